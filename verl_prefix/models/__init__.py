"""Hooks models of Hugging Face, VeOmni and megatron-core up, sees pixels once, and refuses other models."""
