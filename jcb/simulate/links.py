"""What joins devices and machines, as data: for tensor parallel steps and for moving KV pages between pools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """bandwidth: bytes/s in one direction of one device, as published; latency: seconds of an empty message.

    efficiency: share of the bandwidth that large messages reach.
    """

    name: str
    title: str
    bandwidth: float
    latency: float
    source: str
    efficiency: float = 0.85

    def seconds(self, num_bytes: float) -> float:
        """One message of `num_bytes`, alone on the link."""
        return self.latency + num_bytes / (self.bandwidth * self.efficiency)

    def all_reduce_seconds(self, num_bytes: float, devices: int) -> float:
        """A ring all-reduce of `num_bytes` on each of `devices`."""
        if devices == 1:
            return 0.0
        rounds = 2 * (devices - 1)
        return rounds * (self.latency + num_bytes / devices / (self.bandwidth * self.efficiency))


_NVLINK = "NVIDIA's data sheet (half of the total of both directions); latency: order of magnitude of a kernel's hop"
_ICI = "Google's system pages, interconnect bandwidth a chip; latency: order of magnitude"
_NIC = "line rate; latency: order of magnitude with RDMA"

LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("nvlink3", "NVLink 3 (A100)", 300e9, 3e-6, _NVLINK),
        Link("nvlink4", "NVLink 4 (H100, H200)", 450e9, 3e-6, _NVLINK),
        Link("nvlink5", "NVLink 5 (B200)", 900e9, 3e-6, _NVLINK),
        Link("pcie4", "PCIe 4.0 x16", 31.5e9, 5e-6, "PCI-SIG: 16 GT/s, 128b/130b, 16 lanes"),
        Link("pcie5", "PCIe 5.0 x16", 63e9, 5e-6, "PCI-SIG: 32 GT/s, 128b/130b, 16 lanes"),
        Link("ici-v5e", "ICI of TPU v5e", 200e9, 1e-6, _ICI),
        Link("ici-v6e", "ICI of TPU v6e", 400e9, 1e-6, _ICI),
        Link("ici-v5p", "ICI of TPU v5p", 600e9, 1e-6, _ICI),
        Link("ici-tpu7x", "ICI of TPU v7x (one core)", 600e9, 1e-6, _ICI),
        Link("ib-400", "InfiniBand NDR, 400 Gbit/s", 50e9, 5e-6, _NIC),
        Link("eth-400", "Ethernet, 400 Gbit/s", 50e9, 10e-6, _NIC),
        Link("eth-200", "Ethernet, 200 Gbit/s", 25e9, 10e-6, _NIC),
        Link("eth-100", "Ethernet, 100 Gbit/s", 12.5e9, 10e-6, _NIC),
        Link("eth-10", "Ethernet, 10 Gbit/s", 1.25e9, 50e-6, "line rate; latency: order of magnitude with TCP"),
    )
}


def link_named(name: str) -> Link:
    """The link called `name`. Raises ValueError that lists those known."""
    if name.lower() not in LINKS:
        raise ValueError(f"no link {name!r} is known, only {', '.join(LINKS)}")
    return LINKS[name.lower()]
