"""What is usual, what is not, and what that says of a node, a GPU, a NIC, a link or a leaf.

Each round goes through four steps; `detector` owns the state and calls the others:

    measure   `detector._items`      an observation becomes measurements, one for each signal,
                                     compared with `baseline`
    update    `signals`, `outages`   a measurement joins the window of its signal, its open
                                     investigation, and the suspicion of a pair
    decide    `explanation`, `links` pure functions and rules say what explains the bad rounds
    plan      `planner.plan`         a pure function says which extra round is needed next

What a signal of this node goes through:

    quiet ── 2 of the last 3 scheduled rounds bad ──> investigated
      ^                                                   │
      │ more good rounds than chance explains             │ extra rounds with references
      ├───────────────────────────────────────────────────┤
      │                                                   │ enough bad ones, and no few members
      │ 3 good rounds in a row (8 where good and          │ that took part in all of them
      │ bad ones took turns)                              v
      └────────────────────────────────────────────── accused: this node, its part, its leaf

What a pair with one peer goes through:

    quiet ── a bad round with it ──> suspected ── both ends well with others, or nobody
      ^                                │          reaches the peer ──> accused: link or peer
      │ a good round (two after more   │                                   │
      │ than one bad), or 6 slots      │                                   │ two good rounds
      └────────────────────────────────┴───────────────────────────────────┘

Who is believed. A node accuses itself by its own measurements only, and a peer by rounds of the two
of them; what peers say of themselves can take blame away from others, never put it on them. Rounds
that a peer leads unasked count once for each peer. `Surroundings.liars` members may lie together.
"""
