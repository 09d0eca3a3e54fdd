"""Text in, text out: tokenizer, chat template, engine loop and its asyncio front."""
