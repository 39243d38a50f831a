"""Model families: what is particular to Stable Diffusion, Stable Diffusion XL and whoever comes next."""
