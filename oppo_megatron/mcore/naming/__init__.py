"""How Hugging Face, peft and Megatron name the tensors of a model."""
