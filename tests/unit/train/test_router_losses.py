"""Router losses are in a step's metrics where they are part of the loss, and where a rank has reported one."""

from types import SimpleNamespace

from gspo_mega.train.reports import router_losses

REPORTS = [{"num_router_losses": 2.0, "load_balancing_loss": 3.0, "z_loss": 1.0}, {"num_router_losses": 2.0}]


def test_each_is_there_where_it_is_on_and_was_reported():
    both = SimpleNamespace(load_balancing="aux_loss", z_loss_coefficient=0.1)
    assert router_losses(both, REPORTS) == {"routing/load_balancing_loss": 0.75, "routing/z_loss": 0.25}
    assert router_losses(both, [{}, {}]) == {}
    one = SimpleNamespace(load_balancing="none", z_loss_coefficient=0.1)
    assert router_losses(one, REPORTS) == {"routing/z_loss": 0.25}
    other = SimpleNamespace(load_balancing="aux_loss", z_loss_coefficient=0.0)
    assert router_losses(other, REPORTS) == {"routing/load_balancing_loss": 0.75}
