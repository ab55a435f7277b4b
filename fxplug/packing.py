"""The pack lowering: linear layers that read the same value become one product."""
