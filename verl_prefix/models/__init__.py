"""The Hugging Face side: hooks attention and recurrent layers up, sees pixels once, and refuses other models."""
