"""What each migration after the first changes, in SQL (migrations.py runs it).

A view that reads a table which is made anew is dropped first and created again
afterwards; the comments are the documentation, as in schema.py.
"""

from __future__ import annotations

#: Before, a configuration had one call graph, and profiling it on another device
#: or with another engine version replaced it.
GRAPH_OF_EACH_ENVIRONMENT: tuple[str, ...] = (
    "DROP VIEW configuration_coverage",
    "DROP VIEW shared_signature",
    "DROP INDEX occurrence_by_signature",
    "ALTER TABLE occurrence RENAME TO occurrence_1",
    """\
CREATE TABLE occurrence (
    -- A signature at one place of a configuration's call graph. Together they
    -- cover every kernel of one step of the full model exactly once. Each
    -- environment has a graph of its own: kernels differ between two.
    configuration_id INTEGER NOT NULL REFERENCES configuration (id) ON DELETE CASCADE,
    environment_id   INTEGER REFERENCES environment (id),  -- NULL: where there is no other
    position         INTEGER NOT NULL,  -- order in the pass
    path             TEXT NOT NULL,     -- module path, layer numbers as *: 'model.layers.*.mlp'
    module_class     TEXT NOT NULL,     -- 'QKVParallelLinear'
    signature        TEXT NOT NULL REFERENCES signature (hash),
    count            INTEGER NOT NULL CHECK (count >= 1),  -- runs in one step of the full model
    layers           TEXT NOT NULL CHECK (layers LIKE '[%]')  -- JSON array; [] outside the layers
)""",
    # A graph goes to every environment that has measured something of it.
    """\
INSERT INTO occurrence
SELECT o.configuration_id, place.environment_id, o.position, o.path, o.module_class, o.signature,
       o.count, o.layers
FROM occurrence_1 AS o
LEFT JOIN (
    SELECT DISTINCT o.configuration_id, m.environment_id
    FROM occurrence_1 AS o
    JOIN measurement AS m ON m.signature = o.signature
    JOIN configuration AS c ON c.id = o.configuration_id
    JOIN environment AS e ON e.id = m.environment_id AND e.engine = c.engine
) AS place ON place.configuration_id = o.configuration_id""",
    "DROP TABLE occurrence_1",
    """\
CREATE UNIQUE INDEX occurrence_by_place
ON occurrence (configuration_id, ifnull(environment_id, 0), position)""",
    "CREATE INDEX occurrence_by_signature ON occurrence (signature)",
    "CREATE INDEX occurrence_by_environment ON occurrence (environment_id)",
    """\
CREATE VIEW configuration_coverage AS
-- How much of each configuration each environment has measured: complete when
-- every signature that the configuration runs there has a measurement there.
SELECT c.id AS configuration_id, c.model, e.id AS environment_id, e.device,
       count(DISTINCT o.signature) AS signatures,
       count(DISTINCT CASE WHEN k.points > 0 THEN o.signature END) AS measured,
       count(DISTINCT CASE WHEN k.points > 0 THEN o.signature END)
           = count(DISTINCT o.signature) AS complete
FROM configuration AS c
JOIN occurrence AS o ON o.configuration_id = c.id
JOIN environment AS e ON e.engine = c.engine AND (o.environment_id = e.id OR (
    o.environment_id IS NULL AND NOT EXISTS (
        SELECT 1 FROM occurrence AS own
        WHERE own.configuration_id = c.id AND own.environment_id = e.id)))
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

WORKERS: tuple[str, ...] = (
    """\
CREATE TABLE worker (
    -- A process that measures into this file. Gone ones are swept out by others.
    id      INTEGER PRIMARY KEY,
    host    TEXT NOT NULL,     -- name, boot and process namespace: where pid means something
    pid     INTEGER NOT NULL,
    started TEXT NOT NULL,     -- clock ticks since boot: tells it from a later one of this pid
    seen_at TEXT NOT NULL      -- UTC, ISO 8601: its last sign of life
)""",
    """\
CREATE TABLE claim (
    -- What a worker is about to measure, so that no other does. Empty when nobody works.
    environment_id INTEGER NOT NULL REFERENCES environment (id) ON DELETE CASCADE,
    what           TEXT NOT NULL,  -- 'HASH tokens=128', 'steps DIGEST'
    worker_id      INTEGER NOT NULL REFERENCES worker (id) ON DELETE CASCADE,
    PRIMARY KEY (environment_id, what)
)""",
    "CREATE INDEX claim_by_worker ON claim (worker_id)",
)

RUN_CONDITIONS: tuple[str, ...] = (
    """\
CREATE TABLE run_conditions (
    -- One run that measured: how device and host were meanwhile.
    configuration_id INTEGER NOT NULL REFERENCES configuration (id) ON DELETE CASCADE,
    environment_id   INTEGER NOT NULL REFERENCES environment (id),
    started_at       TEXT NOT NULL,  -- UTC, ISO 8601, to the microsecond
    ended_at         TEXT NOT NULL,  -- of the last captured step
    facts            TEXT NOT NULL,  -- JSON object: clock, temperature, throttling, others' load
    PRIMARY KEY (configuration_id, environment_id, started_at)
)""",
)

KV_CAPACITY: tuple[str, ...] = (
    """\
CREATE TABLE kv_capacity (
    -- How many KV blocks the full model has on one rank follows from these sizes, in bytes:
    -- (device_bytes * utilization - weight - activation - other) / block_bytes
    configuration_id       INTEGER NOT NULL REFERENCES configuration (id) ON DELETE CASCADE,
    environment_id         INTEGER NOT NULL REFERENCES environment (id),
    block_bytes            INTEGER NOT NULL CHECK (block_bytes >= 0),   -- in all layers of a rank
    groups                 TEXT NOT NULL CHECK (groups LIKE '[%]'),     -- JSON: layers, block_size
    weight_bytes           INTEGER NOT NULL CHECK (weight_bytes >= 0),  -- of the rank
    device_bytes           INTEGER NOT NULL CHECK (device_bytes >= 0),  -- all of its memory
    max_num_batched_tokens INTEGER NOT NULL,  -- tokens of the step that activation_bytes is of
    activation_bytes       INTEGER,           -- peak of a step; NULL: not measured
    other_bytes            INTEGER,           -- what is not torch's; NULL: not measured
    recorded_at            TEXT NOT NULL,     -- UTC, ISO 8601
    PRIMARY KEY (configuration_id, environment_id)
)""",
)

COLLECTIVES: tuple[str, ...] = (
    """\
CREATE VIEW collective AS
-- Measured collectives by topology, degree and size: what one rank puts in, in bytes.
SELECT json_extract(s.canonical, '$.collective') AS operation,
       json_extract(s.canonical, '$.backend') AS backend,
       json_extract(s.canonical, '$.topology') AS topology,
       json_extract(s.canonical, '$.degree') AS degree,
       json_extract(s.canonical, '$.dtype') AS dtype,
       json_extract(s.canonical, '$.elements') * json_extract(s.canonical, '$.element_bytes')
           * ifnull(p.num_tokens, ifnull(p.num_reqs, 1)) AS bytes,
       m.n, m.min_us, m.median_us, m.max_us, m.unstable, e.device, m.measured_at,
       m.signature, m.environment_id, m.point_id
FROM measurement AS m
JOIN signature AS s ON s.hash = m.signature
JOIN workload_point AS p ON p.id = m.point_id
JOIN environment AS e ON e.id = m.environment_id
WHERE CASE WHEN s.name LIKE 'dooly::%' AND json_valid(s.canonical)
      THEN json_extract(s.canonical, '$.collective') END NOT NULL""",
)

INHERITED: tuple[str, ...] = (
    """\
CREATE TABLE inherited (
    -- Measurements that were not made in their environment, but taken over from another one
    -- of the same device after a few points of the signature had not moved.
    signature      TEXT NOT NULL,
    environment_id INTEGER NOT NULL,
    point_id       INTEGER NOT NULL,
    source_id      INTEGER NOT NULL REFERENCES environment (id),  -- where it was measured
    inherited_at   TEXT NOT NULL,  -- UTC, ISO 8601
    PRIMARY KEY (signature, environment_id, point_id),
    FOREIGN KEY (signature, environment_id, point_id)
        REFERENCES measurement (signature, environment_id, point_id) ON DELETE CASCADE
)""",
    "CREATE INDEX inherited_by_source ON inherited (source_id)",
    "DROP VIEW latency",
    """\
CREATE VIEW latency AS
-- Every measurement with its signature, its point and where it was made.
SELECT s.name, s.granularity, s.kind, p.key AS point,
       p.num_tokens, p.num_reqs, p.num_prefill_tokens, p.num_decodes, p.batch,
       m.n, m.min_us, m.p25_us, m.median_us, m.mean_us, m.max_us, m.std_us, m.unstable,
       e.device, e.engine, e.engine_version, m.measured_at,
       i.source_id AS inherited_from,  -- environment; NULL: measured in this one
       m.signature, m.environment_id, m.configuration_id
FROM measurement AS m
JOIN signature AS s ON s.hash = m.signature
JOIN workload_point AS p ON p.id = m.point_id
JOIN environment AS e ON e.id = m.environment_id
LEFT JOIN inherited AS i ON i.signature = m.signature
    AND i.environment_id = m.environment_id AND i.point_id = m.point_id""",
)

STREAM_STEPS: tuple[str, ...] = (
    """\
CREATE TABLE stream_step (
    -- A step as the engine runs it by default (compiled code, CUDA graphs), one of many equal
    -- ones in a row, each launched before the tokens of the one before it are waited for.
    configuration_id   INTEGER NOT NULL REFERENCES configuration (id) ON DELETE CASCADE,
    environment_id     INTEGER NOT NULL REFERENCES environment (id),
    batch              TEXT NOT NULL,                                  -- '2x128+0,8x1+1024'
    num_layers         INTEGER NOT NULL CHECK (num_layers >= 1),       -- that the engine had
    mode               TEXT NOT NULL CHECK (mode IN ('eager', 'piecewise', 'full')),
    padded_tokens      INTEGER NOT NULL CHECK (padded_tokens >= 1),    -- with the graph's padding
    interval_us        TEXT NOT NULL CHECK (interval_us LIKE '[%]'),   -- JSON: tokens to tokens
    launch_us          TEXT NOT NULL CHECK (launch_us LIKE '[%]'),     -- JSON: what launching took
    device_us          TEXT NOT NULL CHECK (device_us LIKE '[%]'),     -- JSON: by the device
    interval_p25_us    REAL NOT NULL CHECK (interval_p25_us >= 0),
    interval_median_us REAL NOT NULL CHECK (interval_median_us >= 0),
    interval_p75_us    REAL NOT NULL CHECK (interval_p75_us >= 0),
    launch_median_us   REAL NOT NULL CHECK (launch_median_us >= 0),
    measured_at        TEXT NOT NULL,                                  -- UTC, ISO 8601
    PRIMARY KEY (configuration_id, environment_id, batch, num_layers)
)""",
    """\
CREATE TABLE host_step (
    -- What the engine's core does on the host for a step, beside launching it: the scheduler
    -- before, the processing of the tokens afterwards. Measured with an executor that computes
    -- nothing, for steps in which so many requests decode.
    configuration_id   INTEGER NOT NULL REFERENCES configuration (id) ON DELETE CASCADE,
    environment_id     INTEGER NOT NULL REFERENCES environment (id),
    num_reqs           INTEGER NOT NULL CHECK (num_reqs >= 1),
    schedule_us        TEXT NOT NULL CHECK (schedule_us LIKE '[%]'),   -- JSON: samples
    output_us          TEXT NOT NULL CHECK (output_us LIKE '[%]'),     -- JSON: samples
    schedule_median_us REAL NOT NULL CHECK (schedule_median_us >= 0),
    output_median_us   REAL NOT NULL CHECK (output_median_us >= 0),
    measured_at        TEXT NOT NULL,                                  -- UTC, ISO 8601
    PRIMARY KEY (configuration_id, environment_id, num_reqs)
)""",
    """\
CREATE TABLE stream_cost (
    -- What is fitted to stream_step and host_step: a part of a step takes
    -- share_ratio * operations + step_us + layer_us * layers + request_us * requests
    -- + token_us * tokens
    configuration_id INTEGER NOT NULL REFERENCES configuration (id) ON DELETE CASCADE,
    environment_id   INTEGER NOT NULL REFERENCES environment (id),
    mode             TEXT NOT NULL CHECK (mode IN ('eager', 'piecewise', 'full', 'any')),
    part             TEXT NOT NULL CHECK (part IN ('device', 'launch', 'schedule', 'output')),
    share_ratio      REAL NOT NULL,     -- of the sum of the operations; 0 but for 'device'
    step_us          REAL NOT NULL,
    layer_us         REAL NOT NULL,
    request_us       REAL NOT NULL,
    token_us         REAL NOT NULL,     -- per new token, padding left out
    steps            INTEGER NOT NULL,  -- that it was fitted to
    mape_percent     REAL NOT NULL,     -- each batch predicted by a fit to the others
    worst_percent    REAL NOT NULL,
    fitted_at        TEXT NOT NULL,     -- UTC, ISO 8601
    PRIMARY KEY (configuration_id, environment_id, mode, part)
)""",
)

TIMING: tuple[str, ...] = (
    """\
CREATE TABLE measurement_cost (
    -- For how long taking a measurement's samples held the device: warm-ups, rounds that were not
    -- kept, and what ran around each call included. Not known of measurements without a row.
    signature      TEXT NOT NULL,
    environment_id INTEGER NOT NULL,
    point_id       INTEGER NOT NULL,
    timing_us      REAL NOT NULL CHECK (timing_us >= 0),
    PRIMARY KEY (signature, environment_id, point_id),
    FOREIGN KEY (signature, environment_id, point_id)
        REFERENCES measurement (signature, environment_id, point_id) ON DELETE CASCADE
)""",
)

LONE_STEPS: tuple[str, ...] = (
    # SQLite can neither add a column in its place nor change a check: the tables are made anew.
    "ALTER TABLE stream_step RENAME TO stream_step_010",
    STREAM_STEPS[0].replace(
        "    interval_p25_us ",
        "    alone_us           TEXT NOT NULL CHECK (alone_us LIKE '[%]'),      "
        "-- JSON: on an idle device\n    interval_p25_us ",
    ),
    """\
INSERT INTO stream_step SELECT configuration_id, environment_id, batch, num_layers, mode,
    padded_tokens, interval_us, launch_us, device_us, '[]', interval_p25_us, interval_median_us,
    interval_p75_us, launch_median_us, measured_at FROM stream_step_010""",
    "DROP TABLE stream_step_010",
    "ALTER TABLE stream_cost RENAME TO stream_cost_010",
    STREAM_STEPS[2].replace("'launch', ", "'launch', 'before', "),
    "INSERT INTO stream_cost SELECT * FROM stream_cost_010",
    "DROP TABLE stream_cost_010",
)

#: What was fitted as a share of attention, too, goes: profiling and bundling fit again.
ATTENTION_WHOLE: tuple[str, ...] = (
    "DROP TABLE stream_cost",
    STREAM_STEPS[2]
    .replace("'launch', ", "'launch', 'before', ")
    .replace(
        "    -- share_ratio * operations + step_us + layer_us * layers + request_us * requests\n"
        "    -- + token_us * tokens\n",
        "    -- share_ratio * (operations but attention) + step_us + layer_us * layers\n"
        "    -- + request_us * requests + token_us * tokens, and the device attention besides\n",
    )
    .replace("-- of the sum of the operations;", "-- of the operations but attention;"),
)

CLOCK_STEPS: tuple[str, ...] = (
    """\
CREATE TABLE clock_row (
    -- Steps in a row as the device ran them, of few and of many tokens in a pattern: they show
    -- how its clock gives way under load and recovers.
    configuration_id INTEGER NOT NULL REFERENCES configuration (id) ON DELETE CASCADE,
    environment_id   INTEGER NOT NULL REFERENCES environment (id),
    num_layers       INTEGER NOT NULL CHECK (num_layers >= 1),  -- that the engine had
    pattern          TEXT NOT NULL,                             -- '8 requests, pauses of 4'
    tokens           TEXT NOT NULL CHECK (tokens LIKE '[%]'),    -- JSON: new tokens by step
    begin_us         TEXT NOT NULL CHECK (begin_us LIKE '[%]'),  -- JSON: since the first began
    device_us        TEXT NOT NULL CHECK (device_us LIKE '[%]'), -- JSON: how long each took
    measured_at      TEXT NOT NULL,                             -- UTC, ISO 8601
    PRIMARY KEY (configuration_id, environment_id, num_layers, pattern)
)""",
)
