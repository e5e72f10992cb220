"""Classes that NeMo-RL loads by name from its configuration (docs/nemo_rl.md); none imports it."""
