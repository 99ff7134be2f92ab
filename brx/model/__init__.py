"""The models (GPT, Llama, or a class in a user's file), and the stages that they are cut into."""
