# Heartbeats of all trainings that are started from this environment: to be sourced, by sh or bash.
# DSHEALTHD_HEARTBEAT=0 declines.
case ":${PYTHONPATH-}:=${DSHEALTHD_HEARTBEAT-}" in
*=0 | *:/usr/lib/dshealthd/training/dshealthd_site-3-py3-none-any.whl:*) ;;
*)
    PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}/usr/lib/dshealthd/training/dshealthd_site-3-py3-none-any.whl
    export PYTHONPATH
    ;;
esac
