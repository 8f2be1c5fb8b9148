"""The tables and views of a latency database, with their documentation.

SQLite keeps a statement's text, comments included, so `sqlite3 latency.db
.schema` prints this page. Times are microseconds and end in ``_us``; dates are
UTC, ISO 8601. These statements are version 1: a change of the schema is a new
migration (migrations.py), never an edit here.
"""

from __future__ import annotations

VERSION_1: tuple[str, ...] = (
    """\
CREATE TABLE environment (
    -- Where measurements were made. Rows of two environments never mix.
    id             INTEGER PRIMARY KEY,
    digest         TEXT NOT NULL UNIQUE,  -- SHA-256 of the facts below: the same on every machine
    device         TEXT NOT NULL,         -- 'NVIDIA H200'
    device_kind    TEXT NOT NULL,         -- 'cpu' or 'cuda'
    engine         TEXT NOT NULL,         -- 'vllm'
    engine_version TEXT NOT NULL,
    facts          TEXT NOT NULL,         -- JSON object: driver, clocks, versions of torch, ...
    added_at       TEXT NOT NULL,         -- UTC, ISO 8601
    CHECK (length(digest) = 64)
)""",
    """\
CREATE TABLE configuration (
    -- A model as one engine serves it.
    id                INTEGER PRIMARY KEY,
    digest            TEXT NOT NULL UNIQUE,  -- SHA-256 of everything below but facts and added_at
    model             TEXT NOT NULL,         -- 'Qwen/Qwen3-0.6B'
    engine            TEXT NOT NULL,         -- 'vllm'
    backend           TEXT NOT NULL,         -- attention backend: 'FLASH_ATTN'
    dtype             TEXT NOT NULL,         -- 'bfloat16'
    kv_cache_dtype    TEXT NOT NULL,         -- 'auto', 'fp8'
    block_size        INTEGER NOT NULL CHECK (block_size >= 1),         -- KV-cache block, tokens
    tensor_parallel   INTEGER NOT NULL CHECK (tensor_parallel >= 1),    -- ranks
    pipeline_parallel INTEGER NOT NULL CHECK (pipeline_parallel >= 1),  -- stages
    execution_mode    TEXT NOT NULL,         -- 'eager', 'piecewise', 'full_graph'
    num_layers        INTEGER NOT NULL CHECK (num_layers >= 1),         -- of the whole model
    hf_config         TEXT NOT NULL,         -- JSON object: the HF config.json, whole
    facts             TEXT NOT NULL,         -- JSON object: what the engine derived (head_dim, ...)
    added_at          TEXT NOT NULL,         -- UTC, ISO 8601
    CHECK (length(digest) = 64)
)""",
    """\
CREATE TABLE signature (
    -- An operation or module by what the model decides of it. Two operations
    -- share a row exactly when their measurements would be equal.
    hash        TEXT PRIMARY KEY NOT NULL,  -- SHA-256 of canonical
    name        TEXT NOT NULL,              -- 'QKVParallelLinear', 'aten::add.Tensor'
    granularity TEXT NOT NULL CHECK (granularity IN ('operation', 'module')),
    kind        TEXT NOT NULL,              -- what of the request its latency depends on
    canonical   TEXT NOT NULL,              -- dtypes, layout, model dimensions, kernels
    CHECK (kind IN ('constant', 'tokens', 'requests', 'batch', 'routing')),
    CHECK (length(hash) = 64)
)""",
    """\
CREATE TABLE occurrence (
    -- A signature at one place of a configuration's call graph. Together they
    -- cover every kernel of one step of the full model exactly once.
    configuration_id INTEGER NOT NULL REFERENCES configuration (id) ON DELETE CASCADE,
    position         INTEGER NOT NULL,  -- order in the pass
    path             TEXT NOT NULL,     -- module path, layer numbers as *: 'model.layers.*.mlp'
    module_class     TEXT NOT NULL,     -- 'QKVParallelLinear'
    signature        TEXT NOT NULL REFERENCES signature (hash),
    count            INTEGER NOT NULL CHECK (count >= 1),  -- runs in one step of the full model
    layers           TEXT NOT NULL CHECK (layers LIKE '[%]'),  -- JSON array; [] outside the layers
    PRIMARY KEY (configuration_id, position)
)""",
    "CREATE INDEX occurrence_by_signature ON occurrence (signature)",
    """\
CREATE TABLE workload_point (
    -- Where in the space of requests something is measured: what of a batch
    -- a signature of this kind depends on.
    id                 INTEGER PRIMARY KEY,
    key                TEXT NOT NULL UNIQUE,  -- 'tokens=128', 'batch=1x128+0'
    kind               TEXT NOT NULL,         -- the kind of signature that it suits
    num_tokens         INTEGER CHECK (num_tokens >= 1),          -- new tokens of the step
    num_reqs           INTEGER CHECK (num_reqs >= 1),            -- requests of the step
    num_prefill_tokens INTEGER CHECK (num_prefill_tokens >= 0),  -- new tokens of its prefills
    num_decodes        INTEGER CHECK (num_decodes >= 0),         -- its decoding requests
    batch              TEXT,  -- COUNTxQUERY+CONTEXT,...: '2x128+0,8x1+1024'
    num_experts        INTEGER CHECK (num_experts >= 1),  -- distinct experts that fire (routing)
    CHECK (kind IN ('constant', 'tokens', 'requests', 'batch', 'routing')),
    CHECK ((kind = 'routing') = (num_experts IS NOT NULL)),
    CHECK ((kind = 'tokens') <= (num_tokens IS NOT NULL)),
    CHECK ((kind = 'requests') <= (num_reqs IS NOT NULL)),
    CHECK ((kind = 'batch') = (batch IS NOT NULL))
)""",
    """\
CREATE TABLE measurement (
    -- How long one call of a signature took, at one point in one environment.
    -- samples_us is what was measured, warm-ups dropped; the columns after it
    -- are computed from it.
    id               INTEGER PRIMARY KEY,
    signature        TEXT NOT NULL REFERENCES signature (hash),
    environment_id   INTEGER NOT NULL REFERENCES environment (id),
    point_id         INTEGER NOT NULL REFERENCES workload_point (id),
    configuration_id INTEGER REFERENCES configuration (id) ON DELETE SET NULL,  -- measured from it
    samples_us       TEXT NOT NULL CHECK (samples_us LIKE '[%]'),  -- JSON array, in order
    n                INTEGER NOT NULL CHECK (n >= 1),               -- samples
    min_us           REAL NOT NULL CHECK (min_us >= 0),
    p25_us           REAL NOT NULL,  -- lower quartile
    median_us        REAL NOT NULL,
    mean_us          REAL NOT NULL,
    max_us           REAL NOT NULL,
    std_us           REAL NOT NULL CHECK (std_us >= 0),             -- of the population
    unstable         INTEGER NOT NULL CHECK (unstable IN (0, 1)),   -- spread stayed too large
    measured_at      TEXT NOT NULL,  -- UTC, ISO 8601
    UNIQUE (signature, environment_id, point_id),
    CHECK (min_us <= median_us AND median_us <= max_us)
)""",
    "CREATE INDEX measurement_by_environment ON measurement (environment_id)",
    "CREATE INDEX measurement_by_configuration ON measurement (configuration_id)",
    """\
CREATE TABLE skipped_point (
    -- A point that cannot run here, and why. A point is measured or skipped, never both.
    signature      TEXT NOT NULL REFERENCES signature (hash),
    environment_id INTEGER NOT NULL REFERENCES environment (id),
    point_id       INTEGER NOT NULL REFERENCES workload_point (id),
    reason         TEXT NOT NULL,  -- 'out of memory: ...', 'longer than max_model_len'
    skipped_at     TEXT NOT NULL,  -- UTC, ISO 8601
    PRIMARY KEY (signature, environment_id, point_id)
)""",
    """\
CREATE TABLE step_measurement (
    -- A live step of the engine beside the sum of its operations: the rest is
    -- the step's own cost.
    configuration_id INTEGER NOT NULL REFERENCES configuration (id) ON DELETE CASCADE,
    environment_id   INTEGER NOT NULL REFERENCES environment (id),
    batch            TEXT NOT NULL,                               -- '2x128+0,8x1+1024'
    num_layers       INTEGER NOT NULL CHECK (num_layers >= 0),    -- that the live step had
    live_us          TEXT NOT NULL CHECK (live_us LIKE '[%]'),   -- JSON array: the step's samples
    live_median_us   REAL NOT NULL CHECK (live_median_us >= 0),   -- median of live_us
    operations_us    REAL NOT NULL CHECK (operations_us >= 0),    -- its operations, summed
    measured_at      TEXT NOT NULL,                               -- UTC, ISO 8601
    PRIMARY KEY (configuration_id, environment_id, batch, num_layers)
)""",
    """\
CREATE TABLE step_cost (
    -- Step time beyond the operations, fitted to step_measurement:
    -- step_us + layer_us * layers + request_us * requests
    configuration_id INTEGER NOT NULL REFERENCES configuration (id) ON DELETE CASCADE,
    environment_id   INTEGER NOT NULL REFERENCES environment (id),
    step_us          REAL NOT NULL,  -- of every step
    layer_us         REAL NOT NULL,  -- per layer
    request_us       REAL NOT NULL,  -- per request
    fitted_at        TEXT NOT NULL,  -- UTC, ISO 8601
    PRIMARY KEY (configuration_id, environment_id)
)""",
    """\
CREATE VIEW latency AS
-- Every measurement with its signature, its point and where it was made.
SELECT s.name, s.granularity, s.kind, p.key AS point,
       p.num_tokens, p.num_reqs, p.num_prefill_tokens, p.num_decodes, p.batch,
       m.n, m.min_us, m.p25_us, m.median_us, m.mean_us, m.max_us, m.std_us, m.unstable,
       e.device, e.engine, e.engine_version, m.measured_at,
       m.signature, m.environment_id, m.configuration_id
FROM measurement AS m
JOIN signature AS s ON s.hash = m.signature
JOIN workload_point AS p ON p.id = m.point_id
JOIN environment AS e ON e.id = m.environment_id""",
    """\
CREATE VIEW known_signature AS
-- What is known of each signature in each environment: points settled so far.
SELECT s.hash AS signature, s.name, s.granularity, s.kind, settled.environment_id,
       sum(settled.measured) AS points, sum(settled.unstable) AS unstable,
       sum(1 - settled.measured) AS skipped
FROM (
    SELECT signature, environment_id, 1 AS measured, unstable FROM measurement
    UNION ALL
    SELECT signature, environment_id, 0, 0 FROM skipped_point
) AS settled
JOIN signature AS s ON s.hash = settled.signature
GROUP BY s.hash, settled.environment_id""",
    """\
CREATE VIEW configuration_coverage AS
-- How much of each configuration each environment has measured: complete when
-- every signature of the configuration has a measurement there.
SELECT c.id AS configuration_id, c.model, e.id AS environment_id, e.device,
       count(DISTINCT o.signature) AS signatures,
       count(DISTINCT CASE WHEN k.points > 0 THEN o.signature END) AS measured,
       count(DISTINCT CASE WHEN k.points > 0 THEN o.signature END)
           = count(DISTINCT o.signature) AS complete
FROM configuration AS c
JOIN occurrence AS o ON o.configuration_id = c.id
JOIN environment AS e ON e.engine = c.engine
LEFT JOIN known_signature AS k ON k.signature = o.signature AND k.environment_id = e.id
GROUP BY c.id, e.id
HAVING measured > 0""",
    """\
CREATE VIEW shared_signature AS
-- Signatures that several configurations run: measured once for all of them.
SELECT s.hash AS signature, s.name, s.kind,
       count(DISTINCT o.configuration_id) AS configurations,
       group_concat(DISTINCT o.configuration_id) AS configuration_ids
FROM occurrence AS o
JOIN signature AS s ON s.hash = o.signature
GROUP BY s.hash
HAVING configurations > 1""",
)
