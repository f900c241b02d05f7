#!/bin/sh
# The manifests on a real cluster, the one of KUBECONFIG: cluster.sh IMAGE
#
# For some minutes there is a pod on each node, in a namespace that is deleted at the end, and a taint that moves no pod on one node.
set -eu
cd "$(dirname "$0")/../.."
image=$1
namespace=dshealthd-test
overlay=build/test-kubernetes
selector=app.kubernetes.io/name=dshealthd
taint=dshealthd.io/maintenance
tainted=
made=

fail() {
    echo "$*" >&2
    exit 1
}

# Apply the overlay as this field manager.
apply() {
    manager=$1
    shift
    kubectl kustomize "$overlay" | kubectl apply --server-side --field-manager "$manager" "$@" --filename - >/dev/null
}

# Print each pod and its node.
pods() {
    kubectl --namespace "$namespace" get pods --selector "$selector" --field-selector status.phase=Running \
        --output 'jsonpath={range .items[*]}{.metadata.name} {.spec.nodeName}{"\n"}{end}'
}

# Query the agents of all nodes, once each is ready: answers PATH WORD
answers() {
    kubectl --namespace "$namespace" rollout status daemonset/dshealthd --timeout 180s
    [ -n "$(pods)" ] || fail "no node has an agent"
    pods | while read -r pod node; do
        kubectl get --raw "/api/v1/namespaces/$namespace/pods/$pod:10061/proxy$1" | grep -q "$2" ||
            fail "$1 of $pod on $node does not say $2"
    done
}

end() {
    status=$?
    trap - EXIT INT TERM
    if [ "$status" != 0 ] && [ -n "$made" ]; then
        kubectl --namespace "$namespace" describe pods | tail -n 60 >&2
        kubectl --namespace "$namespace" logs --selector "$selector" --all-containers --tail 20 >&2 || true
    fi
    [ -z "$tainted" ] || kubectl taint node "$tainted" "$taint-" || status=1
    [ -z "$made" ] || kubectl delete namespace "$namespace" --timeout 120s || status=1
    exit "$status"
}
trap end EXIT
trap 'exit 130' INT TERM

# Its port is the host's: a second agent could not start, and the first is somebody's.
[ -z "$(kubectl get pods --all-namespaces --selector "$selector" --output name)" ] || fail "this cluster has dshealthd already"
! kubectl get namespace "$namespace" >/dev/null 2>&1 || fail "there is a namespace $namespace already"

rm -rf "$overlay"
mkdir -p "$overlay"
cat >"$overlay/kustomization.yaml" <<TEXT
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: $namespace
resources: [../../deploy/kubernetes/base]
images:
  - {name: ghcr.io/dshealthd/dshealthd, newName: ${image%:*}, newTag: "${image##*:}"}
patches: # leave nothing on the nodes
  - target: {kind: DaemonSet, name: dshealthd}
    patch: |-
      {apiVersion: apps/v1, kind: DaemonSet, metadata: {name: dshealthd}, spec: {template: {spec: {volumes: [
        {name: state, hostPath: null, emptyDir: {}}]}}}}
TEXT
made=yes
apply first
answers /-/ready ready
answers /metrics dshealthd_collector_up
echo "ready on all nodes"

apply second --dry-run=server
echo "the same manifest of another owner makes no conflict"

before=$(pods | sort)
printf '[collectors.clock]\ninterval = "45s"\n' >"$overlay/changed.toml"
printf 'configMapGenerator:\n  - {name: dshealthd, behavior: merge, files: [changed.toml]}\n' >>"$overlay/kustomization.yaml"
apply first
answers /-/ready ready
[ "$(pods | sort)" != "$before" ] || fail "a changed configuration has not reached the pods"
echo "a changed configuration reaches the pods"

read -r pod node <<TEXT
$(pods)
TEXT
kubectl taint node "$node" "$taint=test:NoSchedule"
tainted=$node
sleep 10 # an eviction would have begun
answers /-/ready ready
pods | grep -q "^$pod " || fail "maintenance has moved the agent off $node"
echo "a node in maintenance keeps its agent"
