"""Make random variants of training images, by flips and small changes of colors."""

import random

from PIL import Image, ImageEnhance, ImageOps

JITTER = 0.1  # brightness, contrast and saturation are multiplied by 1 - JITTER to 1 + JITTER
HUE = 0.05  # of the color circle, by which hues turn at most


def augment(image: Image.Image, generator: random.Random) -> Image.Image:
    """Return an RGB image with jittered colors, flipped in half of all cases.

    Brightness, contrast, saturation and hue change a little. The values are those of gaussian-glasses, which
    takes RandomHorizontalFlip and ColorJitter of torchvision; there the four come in a random order.
    """
    if generator.random() < 0.5:
        image = ImageOps.mirror(image)
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = enhance(image).enhance(generator.uniform(1 - JITTER, 1 + JITTER))
    turn = round(256 * generator.uniform(-HUE, HUE))
    hue, saturation, value = image.convert("HSV").split()
    hue = hue.point([(level + turn) % 256 for level in range(256)])
    return Image.merge("HSV", (hue, saturation, value)).convert("RGB")
