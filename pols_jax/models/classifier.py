"""A backbone and its output layer, as one Flax module."""

from typing import Any

import flax.linen as nn
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from pols_jax.heads import ClassHead
from pols_jax.models.backbone import Features, Images, Where


class Classifier(nn.Module):
    """A k-class network of which any single logit can be asked for.

    Initialize it through ``__call__``, in training or evaluation mode: the variables are the same. The output
    layer's parameters are ``params["head"]["kernel"]`` [k, d] and ``params["head"]["bias"]`` [k].

    A backbone whose attribute ``auxiliary`` is True (`InceptionV3`) has a second output layer,
    ``params["auxiliary_head"]``. In training mode its logits are stored as ``auxiliary_logits`` in the collection
    "auxiliary", for ``apply(..., mutable=["batch_stats", "auxiliary"])`` to return; in evaluation it is not computed.

    Attributes:
      backbone: Maps images ``[m, h, w, c]`` to features ``[m, d]``: ``backbone(images, *, train, where)``.
      num_classes: The number of classes k.
      bias_init: The value every bias of the output layer starts from, see `ClassHead`.
      dtype: The dtype of the output layer's product, see `ClassHead`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from pols_jax.models import MODELS
      >>> model = Classifier(MODELS["mlp"](width=0.1), num_classes=1000)
      >>> images = jnp.ones((2, 28, 28, 1))
      >>> variables = model.init(jax.random.key(0), images)
      >>> logits = model.apply(variables, images)
      >>> logits.shape
      (2, 1000)
      >>> one_logit = model.apply(variables, images, 7, method="class_logits")
      >>> bool(jnp.allclose(one_logit, logits[:, 7], atol=1e-5))
      True
    """

    backbone: Any
    num_classes: int
    bias_init: float = 0.0
    dtype: Any = None

    def setup(self):
        """Declares the output layers; the auxiliary one has parameters only if the backbone feeds it."""
        self.head = ClassHead(self.num_classes, bias_init=self.bias_init, dtype=self.dtype)
        self.auxiliary_head = ClassHead(self.num_classes, bias_init=self.bias_init, dtype=self.dtype)

    def __call__(
        self, images: Images, *, train: bool = False, where: Where = None
    ) -> Float[Array, "batch classes"]:
        """Computes the logits of every class.

        Args:
          images: Floating-point images, shape ``[m, h, w, c]``.
          train: Whether batch norm uses this batch's statistics and updates its running ones, and dropout (with the
            random stream "dropout") is on.
          where: True for real examples, shape ``[m]``; None if all are real. Batch norm leaves the others out.

        Returns:
          Logits, shape ``[m, k]``.
        """
        if getattr(self.backbone, "auxiliary", False) and (train or self.is_initializing()):
            features, auxiliary_features = self.backbone.with_auxiliary(images, train=train, where=where)
            auxiliary_logits = self.auxiliary_head(auxiliary_features)
            if not self.is_initializing():
                # Without these functions sow would collect a tuple with one entry for every call.
                self.sow(
                    "auxiliary",
                    "auxiliary_logits",
                    auxiliary_logits,
                    reduce_fn=lambda _, new: new,
                    init_fn=lambda: auxiliary_logits,
                )
        else:
            features = self.features(images, train=train, where=where)
        return self.head(features)

    def features(self, images: Images, *, train: bool = False, where: Where = None) -> Features:
        """Computes the features ``[m, d]`` that the output layer reads; the arguments are those of ``__call__``."""
        return self.backbone(images, train=train, where=where)

    def class_logits(
        self,
        images: Images,
        class_ids: Int[ArrayLike, "..."],
    ) -> Float[Array, "..."]:
        """Computes the logits of the asked classes only: the backbone, and those rows of the output layer.

        Args:
          images: Floating-point images, shape ``[m, h, w, c]``.
          class_ids: One class id, or a vector of ``c`` class ids; they may be traced.

        Returns:
          Logits in evaluation mode, shape ``[m]`` for one id and ``[m, c]`` for a vector of ids.
        """
        return self.head.class_logits(self.features(images), class_ids)
