"""How completely models are traced: the coverage table, collisions, and the ablation of Table 4."""
