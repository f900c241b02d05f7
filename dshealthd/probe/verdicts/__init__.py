"""Verdicts: what is usual, what is not, and which node, GPU, NIC, link or leaf is to blame.

Each round goes through four steps; `detector` owns the state and calls the others:

    measure   `detector._items`      an observation becomes measurements, one for each signal,
                                     compared with `baseline`
    update    `signals`, `pairs`     a measurement is added to the window of its signal, and to its
                                     open investigation; the round to the suspicion of its pair
    decide    `explanation`, `pairs` pure functions find what explains the bad rounds
    plan      `planner.plan`         a pure function yields the extra rounds that are needed next

A signal with which two of the last three peers are bad is investigated: extra rounds with reference
peers confirm it, or show that it was chance. A peer with which a round was bad is suspected: rounds
of both ends with others, and calls of others, show whether it is the peer, the link, or chance.

Each rule is one of medians: a node is at fault if most of its peers find it bad, a link if both of
its ends are well with most others. Members are believed, but a single peer's word accuses nobody.
"""
