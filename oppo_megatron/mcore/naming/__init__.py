"""Names of a model's tensors in Hugging Face, peft and Megatron."""
