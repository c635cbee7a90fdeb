"""DeepSpeed's JSON config, key by key. `zero_strategy.config.deepspeed.read` is the way in."""
