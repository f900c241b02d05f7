"""Verdicts: what is usual, what is not, and which node, GPU, NIC, link or leaf is to blame.

Each round goes through four steps; `detector` owns the state and calls the others:

    measure   `detector._items`      an observation becomes measurements, one for each signal,
                                     compared with `baseline`
    update    `signals`,             a measurement is added to the window of its signal, to its
              `peer_history`         open investigation, and to the suspicion of a pair
    decide    `explanation`, `links` pure functions and rules find what explains the bad rounds
    plan      `planner.plan`         a pure function chooses the extra round that is needed next

States of a signal of this node:

    quiet ── 2 of the last 3 scheduled rounds bad ──> investigated
      ^                                                   │
      │ more good rounds than a fault lets through        │ extra rounds with reference peers
      ├───────────────────────────────────────────────────┤
      │                                                   │ enough bad ones, and no few members
      │ 3 good rounds in a row (8 if the fault            │ could have caused all of them
      │ is intermittent)                                  v
      └────────────────────────────────────────────── accused: this node, its part, its leaf

States of a pair with one peer:

    quiet ── a bad round with it ──> suspected ── both ends well with others, or nobody
      ^                                │          reaches the peer ──> accused: link or peer
      │ a good round (two after more   │                                   │
      │ than one bad), or 6 epochs     │                                   │ two good rounds
      │ without a round                │                                   │
      └────────────────────────────────┴───────────────────────────────────┘

Who is believed: a node accuses itself only by its own measurements, and a peer only by rounds
between the two. What a peer reports about itself can take blame off others, never put it on them.
Rounds that a peer leads on its own initiative count once per peer. Up to `Surroundings.liars`
members may lie together without effect.
"""
