"""Cache policies of other engines, modelled so that they can be run beside Milepost's own."""
