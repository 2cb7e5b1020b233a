import time

from torch import nn


def good(vocab_size, d_model):
    return nn.Sequential(nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size))


def slow(vocab_size, d_model):
    time.sleep(30)
    return good(vocab_size, d_model)
