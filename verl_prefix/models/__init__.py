"""What a Hugging Face model needs: attention hook-up, vision, and which models are refused."""
