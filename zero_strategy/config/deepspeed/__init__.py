"""What DeepSpeed's JSON config says, key by key. `zero_strategy.config.deepspeed.read` is the way in."""
