"""Lesson 05: PPO for text, for comparison with DDPO.

`grammar` writes movie reviews and recognizes them, `language_models` holds policy, value model and reward
model, `text_ppo` the parts of the algorithm, `text_trainer` the loop, `preferences` the losses on pairs of
texts, and `gpt2_reviews` the command that trains GPT-2.
"""
