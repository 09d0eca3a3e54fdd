"""Operations of the models. `api` chooses implementations, `reference` defines what is correct."""
