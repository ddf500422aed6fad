"""The published weights in spare DRAM: they survive engine and trainer.

Always true: weights are verified before use.

``layout``: which tensors are where, and which write is current.  ``node``: one node's files and its
agent.  ``transfer``: agents over the network.  Above them: ``coordinator`` (all nodes), ``store``
(keeps pushes), ``restore`` (loads engines).
"""
