"""Lesson 05: PPO for text, the algorithm that DDPO is best understood beside.

`world` is the grammar that writes movie reviews and recognises them, `models` holds policy, value model and
reward model, `ppo` the parts of the algorithm, `trainer` the loop.
"""
