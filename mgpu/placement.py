"""Where the variables of a model live, and how a built or trained model is moved there in place."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from mgpu.data.split import Layout
from mgpu.errors import ModelError

# Set on a model whose variables mgpu has divided itself.
PLACED = "_mgpu_placed"


def build(model: keras.Model, layout: Layout) -> None:
    """Create every variable that training needs and that is still missing: weights, metrics, losses.

    Keras creates them while it traces the first step; the towers need them before. Nothing is computed.

    Args:
        model: compiled, or only used to predict.
        layout: of the batches, `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
    """
    metrics, losses = model._compile_metrics, model._compile_loss
    built = all(layer.built for layer in model._flatten_layers())
    compiled = all(part is None or part.built for part in (metrics, losses))
    if built and compiled:
        return

    def trace(*tensors: Any) -> tf.Tensor:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(layout.pack(tensors[: len(layout.specs)]))
        y_pred = tensors[-1] if shortcut else (model(x, training=False) if model._call_has_training_arg else model(x))
        if not compiled and y is not None:
            if losses is not None:
                model._compute_loss(x, y, y_pred, sample_weight, training=False)
            model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return tf.zeros(())

    # A built model with one output tells its shape without another forward pass.
    shortcut = built and len(getattr(model, "outputs", None) or []) == 1 and not _has_own_loss(model)
    extra = [tf.TensorSpec(model.outputs[0].shape, model.outputs[0].dtype)] if shortcut else []
    tf.function(trace, input_signature=[*layout.specs, *extra], autograph=False).get_concrete_function()


def _has_own_loss(model: keras.Model) -> bool:
    return type(model).compute_loss is not keras.Model.compute_loss


def sizes_bytes(variables: Iterable[keras.Variable]) -> list[int]:
    """Return the size of each variable in bytes."""
    return [int(v.shape.num_elements() or 0) * tf.as_dtype(v.dtype).size for v in variables]


def devices_of(variables: Iterable[keras.Variable]) -> list[str]:
    """Return the devices that hold `variables`, each once, as short names."""
    return sorted({short(v.value.device) for v in variables})


def short(device: str) -> str:
    """Return "/GPU:0" for "/job:localhost/replica:0/task:0/device:GPU:0"."""
    spec = tf.DeviceSpec.from_string(device)
    return f"/{spec.device_type or 'CPU'}:{spec.device_index or 0}"


def move(variables: Sequence[keras.Variable], homes: Sequence[str]) -> bool:
    """Move variables to their homes, in place: every object that holds them sees them there.

    Args:
        variables: built Keras variables.
        homes: one device name for each.

    Returns:
        Whether any variable was moved. Functions traced before hold the old place and must be traced again.
    """
    moved = False
    for variable, home in zip(variables, homes, strict=True):
        old = variable.value
        if not isinstance(old, tf.Variable) or short(old.device) == short(home):
            continue
        with tf.device(home):
            variable._value = tf.Variable(
                old,
                dtype=old.dtype,
                trainable=old.trainable,
                name=variable.name,
                aggregation=old.aggregation,
                synchronization=old.synchronization,
            )
        moved = True
    return moved


def build_optimizer(optimizer: Any, trainable: Sequence[keras.Variable]) -> bool:
    """Build the optimizer's slots beside their variables, and bring those that exist there.

    Returns:
        Whether a slot was moved.
    """
    if optimizer is None or not trainable:
        return False
    if not optimizer.built:
        optimizer.build(trainable)
    slots, homes = [], []
    for slot in optimizer.variables:
        owner = _owner(slot, trainable)
        if owner is not None:
            slots.append(slot)
            homes.append(short(owner.value.device))
    moved = move(slots, homes)
    _renew_keys(optimizer, trainable)
    return moved


def _owner(slot: keras.Variable, trainable: Sequence[keras.Variable]) -> keras.Variable | None:
    # Keras names a slot after the path of its variable, "/" replaced by "_".
    found = [v for v in trainable if v.path.replace("/", "_") in slot.path and v.shape == slot.shape]
    return max(found, key=lambda v: len(v.path), default=None)


def _renew_keys(optimizer: Any, trainable: Sequence[keras.Variable]) -> None:
    # Keras finds a variable's slots by the id of its tf.Variable, which moving has changed.
    inner = getattr(optimizer, "inner_optimizer", None)
    for each in (optimizer, inner):
        if each is not None and getattr(each, "_trainable_variables_indices", None):
            each._trainable_variables_indices = {each._var_key(v): i for i, v in enumerate(trainable)}


def refuse_scattered(model: keras.Model, ps_device: Any) -> None:
    """Refuse a model whose weights were put on several devices on purpose.

    Raises:
        ModelError: the model's variables live on more than one device, and `ps_device` does not say where
            they shall go.
    """
    if ps_device != "auto" or model.__dict__.get(PLACED):
        return
    variables = [v for v in model.variables if isinstance(v.value, tf.Variable)] if model.built else []
    devices = devices_of(variables)
    if len(devices) > 1:
        odd = {d: next(v.path for v in variables if short(v.value.device) == d) for d in devices}
        found = ", ".join(f"{path!r} on {device}" for device, path in odd.items())
        raise ModelError(
            f"make_parallel() got the model {model.name!r} with its weights on {len(devices)} devices: {found}. A "
            "part of it was probably built inside tf.device(...), and each tower runs the whole model. To gather "
            f"the weights on one device pass ps_device={devices[0]!r}; to divide them by bytes, ps_device='spread'."
        )
