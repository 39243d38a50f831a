"""Average a reward's classifier over views of an image, so that it is harder to fool."""

import torch
import torch.nn.functional as F
from torch import nn


class AveragedOverViews(nn.Module):
    """A classifier whose log-probabilities are means over six views of each image.

    A policy that is trained on a classifier's output also finds images that only this classifier recognizes.
    With an average over changed copies of an image, a change must work in most of the copies::

        log p(class | image) = mean over views of log p(class | view)

    The views are the image, its mirror image, and the image shifted by `pixels` towards each of its four
    corners, where pixels of the edge are repeated. `classifier` maps images (B, C, H, W) to a tuple of logits
    (B, K), and the averages (B, K) are also a tuple. Their softmax is the normalized geometric mean of the
    views' probabilities. Each forward pass runs the classifier on 6 B images. A ValueError refuses `pixels`
    below 1. Source: Krizhevsky et al. 2012 (AlexNet), section 4.1, where the probabilities of five crops and
    their mirror images are averaged.
    """

    def __init__(self, classifier: nn.Module, pixels: int = 3) -> None:
        super().__init__()
        if pixels < 1:
            raise ValueError(f"pixels={pixels}: a view must be shifted by at least 1")
        self.classifier, self.pixels = classifier, pixels

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the averages over the views of images (B, C, H, W), as a tuple of (B, K)."""
        views = self.views(images)  # (6, B, C, H, W)
        outputs = self.classifier(views.flatten(0, 1))  # (6 B, K) each
        return tuple(out.log_softmax(dim=1).unflatten(0, views.shape[:2]).mean(dim=0) for out in outputs)

    def views(self, images: torch.Tensor) -> torch.Tensor:
        """Return the six views of images (B, C, H, W): (6, B, C, H, W)."""
        height, width = images.shape[2:]
        padded = F.pad(images, (self.pixels,) * 4, mode="replicate")
        offsets = (0, 2 * self.pixels)
        shifted = [padded[:, :, top:, left:][:, :, :height, :width] for top in offsets for left in offsets]
        return torch.stack([images, images.flip(3), *shifted])
