"""The schema of the state file and the way from each version to the next.

`PRAGMA user_version` holds the version. A migration is a list of statements; all that are needed
run in one transaction. A released migration is never changed.
"""

from __future__ import annotations

APPLICATION_ID = 0x67707031  # "gpp1"

MIGRATIONS: list[list[str]] = [
    [  # 1
        """CREATE TABLE meta (
            key TEXT PRIMARY KEY,
            value TEXT NOT NULL
        ) STRICT""",
        """CREATE TABLE gpus (
            uuid TEXT PRIMARY KEY,
            position INTEGER NOT NULL,
            name TEXT NOT NULL,
            memory_mib INTEGER NOT NULL,
            driver_reserved_mib INTEGER NOT NULL,
            compute_capability TEXT NOT NULL,
            pci_address TEXT NOT NULL,
            numa_node INTEGER NOT NULL,
            mode TEXT NOT NULL DEFAULT 'shared' CHECK (mode IN ('shared', 'mig', 'whole')),
            drained INTEGER NOT NULL DEFAULT 0 CHECK (drained IN (0, 1))
        ) STRICT""",
        """CREATE TABLE slices (
            id TEXT PRIMARY KEY,
            name TEXT NOT NULL UNIQUE,
            kind TEXT NOT NULL CHECK (kind IN ('shared', 'mig', 'whole')),
            gpu_uuid TEXT NOT NULL REFERENCES gpus (uuid),
            compute_percent INTEGER NOT NULL CHECK (compute_percent BETWEEN 1 AND 100),
            memory_mib INTEGER NOT NULL CHECK (memory_mib >= 1),
            mode TEXT NOT NULL CHECK (mode IN ('hard', 'elastic')),
            priority INTEGER NOT NULL,
            virtual_uuid TEXT NOT NULL UNIQUE,
            pci_address TEXT NOT NULL UNIQUE,
            owner_uid INTEGER NOT NULL,
            temporary INTEGER NOT NULL CHECK (temporary IN (0, 1)),
            created_at REAL NOT NULL
        ) STRICT""",
        """CREATE TABLE leases (
            id TEXT PRIMARY KEY,
            kind TEXT NOT NULL CHECK (kind IN ('owner', 'run')),
            owner_uid INTEGER NOT NULL,
            key BLOB NOT NULL CHECK (length(key) = 32),
            created_at REAL NOT NULL
        ) STRICT""",
        # UNIQUE slice_id: a slice is in one lease at a time.
        """CREATE TABLE lease_slices (
            lease_id TEXT NOT NULL REFERENCES leases (id) ON DELETE CASCADE,
            ordinal INTEGER NOT NULL,
            slice_id TEXT NOT NULL UNIQUE REFERENCES slices (id),
            PRIMARY KEY (lease_id, ordinal)
        ) STRICT""",
        """CREATE TABLE runs (
            id TEXT PRIMARY KEY,
            lease_id TEXT NOT NULL REFERENCES leases (id) ON DELETE CASCADE,
            uid INTEGER NOT NULL,
            pid INTEGER NOT NULL,
            start_ticks INTEGER NOT NULL,
            boot_id TEXT NOT NULL,
            command TEXT NOT NULL,
            lease_file TEXT NOT NULL,
            created_at REAL NOT NULL
        ) STRICT""",
        """CREATE TABLE events (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            time REAL NOT NULL,
            kind TEXT NOT NULL,
            subject TEXT NOT NULL,
            text TEXT NOT NULL,
            data TEXT NOT NULL,
            owner_uid INTEGER
        ) STRICT""",
        "INSERT INTO meta (key, value) VALUES ('generation', '1')",
    ],
    [  # 2: leases of virtual machines. A CHECK is changed by making the table anew, and those that
        # refer to it with it.
        """CREATE TABLE new_leases (
            id TEXT PRIMARY KEY,
            kind TEXT NOT NULL CHECK (kind IN ('owner', 'run', 'vm')),
            owner_uid INTEGER NOT NULL,
            key BLOB NOT NULL CHECK (length(key) = 32),
            created_at REAL NOT NULL
        ) STRICT""",
        "INSERT INTO new_leases SELECT id, kind, owner_uid, key, created_at FROM leases",
        """CREATE TABLE new_lease_slices (
            lease_id TEXT NOT NULL REFERENCES new_leases (id) ON DELETE CASCADE,
            ordinal INTEGER NOT NULL,
            slice_id TEXT NOT NULL UNIQUE REFERENCES slices (id),
            PRIMARY KEY (lease_id, ordinal)
        ) STRICT""",
        "INSERT INTO new_lease_slices SELECT lease_id, ordinal, slice_id FROM lease_slices",
        """CREATE TABLE new_runs (
            id TEXT PRIMARY KEY,
            lease_id TEXT NOT NULL REFERENCES new_leases (id) ON DELETE CASCADE,
            uid INTEGER NOT NULL,
            pid INTEGER NOT NULL,
            start_ticks INTEGER NOT NULL,
            boot_id TEXT NOT NULL,
            command TEXT NOT NULL,
            lease_file TEXT NOT NULL,
            created_at REAL NOT NULL
        ) STRICT""",
        "INSERT INTO new_runs SELECT id, lease_id, uid, pid, start_ticks, boot_id, command,"
        " lease_file, created_at FROM runs",
        "DROP TABLE lease_slices",
        "DROP TABLE runs",
        "DROP TABLE leases",
        "ALTER TABLE new_leases RENAME TO leases",
        "ALTER TABLE new_lease_slices RENAME TO lease_slices",
        "ALTER TABLE new_runs RENAME TO runs",
        # No reference to leases: a row outlives its lease until devices and region are removed.
        """CREATE TABLE guests (
            id TEXT PRIMARY KEY,
            domain_uuid TEXT NOT NULL,
            domain_name TEXT NOT NULL,
            slice_name TEXT NOT NULL,
            owner_uid INTEGER NOT NULL,
            temporary INTEGER NOT NULL CHECK (temporary IN (0, 1)),
            region_path TEXT NOT NULL,
            region_inode INTEGER NOT NULL,
            epoch INTEGER NOT NULL CHECK (epoch >= 1),
            created_at REAL NOT NULL,
            ended_at REAL
        ) STRICT""",
        # A virtual machine has one lease at a time.
        "CREATE UNIQUE INDEX one_lease_of_a_guest ON guests (domain_uuid) WHERE ended_at IS NULL",
    ],
    [  # 3: the broker learns the ports of virtual machines from a gpupoold that has just started.
        "ALTER TABLE guests ADD COLUMN port_path TEXT NOT NULL DEFAULT ''",
    ],
    [  # 4: and which virtual machine comes by vsock.
        "ALTER TABLE guests ADD COLUMN vsock_cid INTEGER NOT NULL DEFAULT 0",
    ],
    [  # 5: while which QEMU process runs.
        "ALTER TABLE guests ADD COLUMN qemu_pid INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE guests ADD COLUMN qemu_start INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE guests ADD COLUMN qemu_boot TEXT NOT NULL DEFAULT ''",
    ],
    [  # 6: slices of other hosts, whose cards are not in `gpus`, and leases that other hosts have.
        """CREATE TABLE new_slices (
            id TEXT PRIMARY KEY,
            name TEXT NOT NULL UNIQUE,
            kind TEXT NOT NULL CHECK (kind IN ('shared', 'mig', 'whole')),
            gpu_uuid TEXT NOT NULL,
            compute_percent INTEGER NOT NULL CHECK (compute_percent BETWEEN 1 AND 100),
            memory_mib INTEGER NOT NULL CHECK (memory_mib >= 1),
            mode TEXT NOT NULL CHECK (mode IN ('hard', 'elastic')),
            priority INTEGER NOT NULL,
            virtual_uuid TEXT NOT NULL UNIQUE,
            pci_address TEXT NOT NULL UNIQUE,
            owner_uid INTEGER NOT NULL,
            temporary INTEGER NOT NULL CHECK (temporary IN (0, 1)),
            created_at REAL NOT NULL,
            host TEXT NOT NULL DEFAULT ''
        ) STRICT""",
        "INSERT INTO new_slices SELECT id, name, kind, gpu_uuid, compute_percent, memory_mib, mode,"
        " priority, virtual_uuid, pci_address, owner_uid, temporary, created_at, '' FROM slices",
        """CREATE TABLE new_leases (
            id TEXT PRIMARY KEY,
            kind TEXT NOT NULL CHECK (kind IN ('owner', 'run', 'vm', 'peer')),
            owner_uid INTEGER NOT NULL,
            key BLOB NOT NULL CHECK (length(key) = 32),
            created_at REAL NOT NULL
        ) STRICT""",
        "INSERT INTO new_leases SELECT id, kind, owner_uid, key, created_at FROM leases",
        """CREATE TABLE new_lease_slices (
            lease_id TEXT NOT NULL REFERENCES new_leases (id) ON DELETE CASCADE,
            ordinal INTEGER NOT NULL,
            slice_id TEXT NOT NULL UNIQUE REFERENCES new_slices (id),
            PRIMARY KEY (lease_id, ordinal)
        ) STRICT""",
        "INSERT INTO new_lease_slices SELECT lease_id, ordinal, slice_id FROM lease_slices",
        """CREATE TABLE new_runs (
            id TEXT PRIMARY KEY,
            lease_id TEXT NOT NULL REFERENCES new_leases (id) ON DELETE CASCADE,
            uid INTEGER NOT NULL,
            pid INTEGER NOT NULL,
            start_ticks INTEGER NOT NULL,
            boot_id TEXT NOT NULL,
            command TEXT NOT NULL,
            lease_file TEXT NOT NULL,
            created_at REAL NOT NULL
        ) STRICT""",
        "INSERT INTO new_runs SELECT id, lease_id, uid, pid, start_ticks, boot_id, command,"
        " lease_file, created_at FROM runs",
        "DROP TABLE lease_slices",
        "DROP TABLE runs",
        "DROP TABLE leases",
        "DROP TABLE slices",
        "ALTER TABLE new_slices RENAME TO slices",
        "ALTER TABLE new_leases RENAME TO leases",
        "ALTER TABLE new_lease_slices RENAME TO lease_slices",
        "ALTER TABLE new_runs RENAME TO runs",
        # A slice here that is on another host: asked for, held, or lost. What comes with the
        # grant is empty until then.
        """CREATE TABLE borrowed (
            slice_id TEXT PRIMARY KEY REFERENCES slices (id) ON DELETE CASCADE,
            state TEXT NOT NULL CHECK (state IN ('asking', 'held', 'lost')),
            lease_id TEXT NOT NULL DEFAULT '',
            key BLOB NOT NULL DEFAULT x'',
            address TEXT NOT NULL DEFAULT '',
            snapshot BLOB NOT NULL DEFAULT x''
        ) STRICT""",
        # Leases of other hosts that are no longer needed, until these know it.
        """CREATE TABLE giving_back (
            lease_id TEXT PRIMARY KEY,
            host TEXT NOT NULL
        ) STRICT""",
        # Leases here that other hosts have.
        """CREATE TABLE lent (
            lease_id TEXT PRIMARY KEY REFERENCES leases (id) ON DELETE CASCADE,
            peer TEXT NOT NULL,
            consumer TEXT NOT NULL
        ) STRICT""",
    ],
]

VERSION = len(MIGRATIONS)
