"""Hugging Face's models and Trainer; the public names are in `zero_strategy.integrations.transformers`."""
