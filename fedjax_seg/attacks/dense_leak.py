"""The input of a dense first layer, read off its gradient: no optimisation, and exact for one example.

For y = x W + b the gradients are dL/dW = x dL/dy and dL/db = dL/dy, so that every column of dL/dW is the input times
one entry of dL/db.
Source: Geiping et al., "Inverting gradients" (2020), proposition 3.1; Phong et al., "Privacy-preserving deep learning
via additively homomorphic encryption" (2018), section 3.
"""

import numpy as np

from fedjax_seg.core.checks import UserError


def recover(kernel: np.ndarray, bias: np.ndarray, count: int = 1) -> np.ndarray:
    """The inputs that a gradient shows.

    Args:
      kernel: dL/dW [d, h]; bias: dL/db [h]; of one example or the mean over several.
      count: of examples. One: the least squares solution over all h columns, sum_i W_i b_i / sum_i b_i^2, exact without
        noise and the best there is with it. More: the quotient of the `count` columns with the largest |dL/db|;
        each is a mixture of the examples, and one of them alone only where no other one moves that unit. Beyond h the
        best column is repeated.

    Returns: float64 [count, d]; zeros where dL/db is 0.
    Raises: UserError where the shapes do not fit, or count is below 1.
    """
    w, b = np.asarray(kernel, np.float64), np.asarray(bias, np.float64)
    if w.ndim != 2 or b.shape != w.shape[1:]:
        raise UserError(f"dense_leak: gradients of shapes {w.shape} and {b.shape} given, [d, h] and [h] expected")
    if count < 1:
        raise UserError(f"dense_leak: count {count} given, at least 1 expected")
    if count == 1:
        return (w @ b / max(float(b @ b), np.finfo(float).tiny))[None]
    order = np.argsort(-np.abs(b), kind="stable")[:count]
    columns = np.concatenate([order, np.repeat(order[:1], count - len(order))])
    safe = np.where(b[columns] == 0, np.inf, b[columns])
    return (w[:, columns] / safe).T


def bias_of(kernel_path: str) -> str:
    """The path of the bias beside a kernel: 'params/Dense_0/kernel' -> 'params/Dense_0/bias'."""
    return kernel_path.rsplit("/", 1)[0] + "/bias"
