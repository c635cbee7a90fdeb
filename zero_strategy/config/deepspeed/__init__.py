"""What DeepSpeed's JSON config says, key by key. `zero_strategy.config.deepspeed_json` is the way in."""
