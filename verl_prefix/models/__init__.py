"""The Hugging Face side: attention hook-up, vision, and the models that are refused."""
