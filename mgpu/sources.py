"""Python sources of data whose own errors reach the caller of fit, not TensorFlow's account of them."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf


@contextlib.contextmanager
def guarded(args: tuple, kwargs: dict) -> Iterator[tuple[tuple, dict]]:
    """Watch the generators and PyDatasets among the arguments of fit, evaluate or predict.

    TensorFlow runs them inside an op and reports an exception of theirs as an error of that op. This raises the
    exception itself: its type, its text, its traceback.

    Yields:
        The arguments to pass on.
    """
    raised: list[BaseException] = []
    try:
        yield (
            tuple(_watched(a, raised) for a in args),
            {name: _watched(value, raised) for name, value in kwargs.items()},
        )
    except tf.errors.OpError as error:
        if raised:
            # Taken out, since it holds all frames of the call alive, and with them the source's threads.
            raise raised.pop(0) from error
        raise


def _watched(source: Any, raised: list[BaseException]) -> Any:
    if isinstance(source, types.GeneratorType):
        return _watched_generator(source, raised)
    if isinstance(source, keras.utils.PyDataset) and not source.use_multiprocessing:
        return _watched_dataset(source, raised)
    return source


def _watched_generator(source: Iterator, raised: list[BaseException]) -> Iterator:
    try:
        yield from source
    except GeneratorExit:
        raise
    except BaseException as error:
        raised.append(error)
        raise


def _watched_dataset(source: keras.utils.PyDataset, raised: list[BaseException]) -> keras.utils.PyDataset:
    def getitem(self: keras.utils.PyDataset, index: int) -> Any:
        try:
            return source[index]
        except BaseException as error:
            raised.append(error)
            raise

    # The same dataset under a class that looks on: it shares its attributes with the one that was passed.
    view: Any = object.__new__(type(type(source).__name__, (type(source),), {"__getitem__": getitem}))
    view.__dict__ = source.__dict__
    return view
