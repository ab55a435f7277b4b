"""What users write: passes, rules, addresses and configurations, read and checked. Imports no torch."""
