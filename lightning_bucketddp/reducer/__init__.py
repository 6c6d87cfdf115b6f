"""The pass: when buckets are launched, waited for and published, and what ranks agree on meanwhile."""
