"""Federated Bayesian learning with PyTorch Lightning.

A class is named by its room: ``lit_epgan.callbacks.FederationCallback``, ``lit_epgan.datamodules.FederatedDataModule``,
``lit_epgan.federated.FedAvg``. Here ``callbacks``, ``datamodules`` and ``configs`` are links to the folders beside this
one; what is installed holds them as folders. Importing this package alone imports nothing else.
"""
