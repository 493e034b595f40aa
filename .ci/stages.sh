# What .ci/run and .ci/long share: stages with their times, a record of them, and a look at what they leave behind. Sourced, not run.
#
# The caller sets `known` (its stages), `stages` (those to run) and `guard_minutes`, and calls `start "$@"`; then, for each stage,
# `if wanted NAME; then ...; fi`, and `finish` last.
#
# `start` calls the script a second time, under the guard and, where root may, in namespaces of its own: there /tmp and /dev/shm are
# empty, so that whatever a stage leaves in them is its own, and every process ends with the run. What comes after `start` runs inside.
#
# CI_STRICT=1: what the machine does not allow (status 77, points that are skipped) is a failure.
# shellcheck shell=bash disable=SC2154

target=${CARGO_TARGET_DIR:-$PWD/target}
export CARGO_TARGET_DIR=$target CARGO_INCREMENTAL=0 CARGO_TERM_COLOR=never CARGO_TERM_PROGRESS_WHEN=never
export INTEROP_VENV=${INTEROP_VENV:-$target/interop/venv} PYTHONDONTWRITEBYTECODE=1
unset RUSTFLAGS RUSTDOCFLAGS RUSTC_WORKSPACE_WRAPPER

records=$target/ci/$(basename "$0")
# What a stage says of itself in the table.
remark=
# The folder of this run; empty outside.
scratch=${SEPAL_CI_SCRATCH:-}
unset SEPAL_CI_SCRATCH

start() {
    local name
    if [ "${1:-}" = --status ]; then
        show_table
        exit 0
    fi
    for name in $stages; do
        case " $known " in
            *" $name "*) ;;
            *) echo "no stage is called $name" >&2; exit 2 ;;
        esac
    done
    [ -n "$scratch" ] || outside "$@"
    state=$scratch/ci log=$scratch/ci/log
    export TMPDIR=$scratch/tmp XDG_RUNTIME_DIR=$scratch/run
    # Without namespaces of its own a run ends what it began.
    trap 'for job in $(jobs -p); do kill "$job" 2>/dev/null || true; done' EXIT
    trap 'exit 143' TERM
}

# Whether this run can have namespaces, a /tmp and a /dev/shm of its own: not where it needs what lies in those.
own_spaces() {
    [ "$(id -u)" = 0 ] || return 1
    case ":$PWD:$target:$HOME:${CARGO_HOME:-}:${RUSTUP_HOME:-}:${INTEROP_VENV:-}:$PATH:" in
        *:/tmp/* | *:/dev/shm/*) return 1 ;;
    esac
    "${spaces[@]}" true 2>/dev/null
}

# Runs the script inside, tells how it went, and does not return.
outside() {
    local outer status=0 failed began now spaces
    outer=$(mktemp -d /tmp/sepal-ci.XXXXXX)
    # Paths of sockets are short: they live below this folder, which is /tmp inside.
    chmod 1777 "$outer"
    mkdir -m 700 "$outer/tmp" "$outer/run" "$outer/ci" "$outer/ci/tmp"
    # shellcheck disable=SC2064
    trap "rm -rf '$outer'" EXIT
    # shellcheck disable=SC2016
    spaces=(unshare --mount --pid --fork --kill-child --mount-proc bash -c
        'mount --bind "$0" /tmp && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && exec "$@"' "$outer")
    scratch=/tmp
    own_spaces || scratch=$outer spaces=()
    SEPAL_CI_SCRATCH=$scratch timeout --kill-after=60 "${guard_minutes}m" "${spaces[@]}" ".ci/$(basename "$0")" "$@" </dev/null &
    child=$!
    trap 'kill "$child" 2>/dev/null' INT TERM HUP
    while :; do
        status=0
        wait "$child" || status=$?
        kill -0 "$child" 2>/dev/null || break
    done
    failed=
    if [ -f "$outer/ci/stage" ]; then
        read -r failed began <"$outer/ci/stage"
        now=$(date +%s)
        record "$failed" $((now - began)) failed "with status $status"
        [ $status -ne 0 ] || status=1
    fi
    ran=$(cat "$outer/ci/ran" 2>/dev/null || true)
    show_table
    printf 'total %d s\n' $SECONDS
    if [ $SECONDS -ge $((60 * guard_minutes)) ]; then
        printf '==> ended after %d minutes: something hangs, or the machine is far too slow\n' "$guard_minutes" >&2
    fi
    [ -z "$failed" ] || printf '==> stage %s failed with status %d after %d s\n' "$failed" $status $SECONDS >&2
    # The closing line of the interop run stays the last one.
    if [ -f "$outer/ci/summary" ] && { [ $status -eq 0 ] || [ "$failed" = interop ]; }; then
        cat "$outer/ci/summary"
    fi
    exit $status
}

# record STAGE SECONDS passed|ignored|failed REMARK: a line of what passed last, then one of what came after that.
record() {
    local commit passed
    commit=$(git describe --always --dirty=+ --exclude '*' 2>/dev/null || echo unknown)
    mkdir -p "$records"
    passed=$(head -n 1 "$records/$1" 2>/dev/null || printf -- '-\tnever\t-\n')
    [ "$3" != passed ] || passed=$(printf '%s\t%s\t%s' "$2" "$(date '+%F %H:%M')" "$commit")
    {
        printf '%s\n' "$passed"
        case $3 in
            passed) [ -z "$4" ] || printf '%s\n' "$4" ;;
            *) printf '%s at %s after %d s: %s\n' "$3" "$commit" "$2" "$4" ;;
        esac
    } >"$records/$1"
}

# Every stage: when it last passed, and what came after that. A star marks those of this run.
show_table() {
    local name seconds passed commit rest mark
    printf '  %-12s %8s  %-16s  %-10s\n' stage seconds 'last passed' commit
    for name in $known; do
        mark=' '
        case " ${ran:-} " in *" $name "*) mark='*' ;; esac
        rest=
        if [ -f "$records/$name" ]; then
            IFS=$'\t' read -r seconds passed commit <"$records/$name"
            rest=$(sed 1d "$records/$name")
        else
            seconds=- passed=never commit=-
        fi
        printf '%s %-12s %8s  %-16s  %-10s %s\n' "$mark" "$name" "$seconds" "$passed" "$commit" "$rest"
    done
}

wanted() {
    close_stage
    case " $stages " in
        *" $1 "*) ;;
        *) return 1 ;;
    esac
    stage=$1 began=$SECONDS remark='' outcome=passed
    printf '%s %s\n' "$1" "$(date +%s)" >"$state/stage"
    printf '%s ' "$1" >>"$state/ran"
    shared_files >"$state/before"
    printf '==> %s (at %d s)\n' "$1" $SECONDS
}

close_stage() {
    [ -n "${stage:-}" ] || return 0
    nothing_left
    printf '==> %s took %d s%s\n' "$stage" $((SECONDS - began)) "${remark:+, $outcome ($remark)}"
    record "$stage" $((SECONDS - began)) "$outcome" "$remark"
    rm "$state/stage"
    stage=
}

finish() {
    close_stage
}

# One line each: what lies in the folders of this run, and in those that belong to all.
shared_files() {
    # Of the runtime folder of servers only the folders of runs count: its locks stay.
    find "$scratch/tmp" -mindepth 1 -maxdepth 2
    find "$scratch/run" -name '*.d'
    if [ "$scratch" = /tmp ]; then
        # Flags are read with no environment in tests: then the folder of the user's own is made.
        find /tmp /dev/shm -mindepth 1 -maxdepth 1 ! -path /tmp/tmp ! -path /tmp/run ! -path /tmp/ci ! \( -path '/tmp/sepal-*' -empty \)
        return
    fi
    # Others of this user work here too. Left behind are names that say of which process they are, which has ended, and sockets that
    # nobody has.
    local path pid
    find /dev/shm -maxdepth 1 -user "$(id -u)" \( -name 'sepal-mapping-*' -o -name 'torch_*' \) 2>/dev/null | while read -r path; do
        pid=$(grep -oE '[0-9]+' <<<"${path##*/}" | head -n 1)
        [ -z "$pid" ] || [ -e "/proc/$pid" ] || echo "$path"
    done
    find /tmp -maxdepth 1 -user "$(id -u)" -type s -name '*p2p*' 2>/dev/null | while read -r path; do
        grep -qF " $path" /proc/net/unix || echo "$path"
    done
}

# Fails when this stage left something. What a process that is just ending takes along may still be there: it has a minute.
nothing_left() {
    local left try
    for try in $(seq 60); do
        left=$(shared_files | sort | comm -13 <(sort "$state/before") -)
        [ -n "$left" ] || return 0
        [ "$try" = 60 ] || sleep 1
    done
    printf 'stage %s left behind:\n%s\n' "$stage" "$left" >&2
    # Not `return`: it would be lost in a condition.
    exit 1
}

# Runs a command whose status 77 says that this machine does not let it test anything, or not all; its last line says why.
optional() {
    local status=0
    "$@" 2>&1 | tee "$log" || status=$?
    [ $status = 77 ] || return $status
    remark=$(tail -n 1 "$log") outcome=ignored
    strictly
}

# Fails if nothing may be left out.
strictly() {
    if [ "${CI_STRICT:-0}" = 1 ]; then
        echo "==> $stage: something was left out, and CI_STRICT=1 makes that a failure" >&2
        return 1
    fi
}

# Runs a command, shows its output, and fails if cargo warned of anything: in the crates of the workspace, or that images of kernels are
# older than their sources.
without_warnings() {
    local status=0
    "$@" 2>&1 | tee "$log" || status=$?
    if grep '^warning' "$log" | grep -v 'spurious network error' >&2; then
        echo "==> a warning of cargo is an error here" >&2
        return 1
    fi
    return $status
}

# The build of the tests, whose executable and examples every stage uses that needs no release build: `target/debug/sepal` has emulated
# devices. Another command of cargo, even `cargo build`, would choose other features and build again.
debug_build() {
    # Afterwards nothing comes from the network, whose troubles are warnings too.
    cargo fetch --locked
    without_warnings cargo test --locked --no-run
}

# background NAME COMMAND...: downloads come while others compile.
background() {
    local name=$1
    shift
    mkdir -p "$target/ci"
    TMPDIR=$state/tmp "$@" >"$target/ci/$name.log" 2>&1 </dev/null &
    printf -v "background_$name" %d $!
}

# Waits for it.
ready() {
    local job=background_$1
    [ -n "${!job:-}" ] || return 0
    wait "${!job}" || { cat "$target/ci/$1.log" >&2; return 1; }
    unset "$job"
}

# The real Petals of PyPI, 0.8 GB, and the clients of OpenAI's API, for the stages that need them.
download() {
    case " $stages " in *" interop "* | *" nat "*) background petals tests/interop/setup.sh ;; esac
    case " $stages " in *" openai "* | *" clients "*) background openai tests/openai/run --out "$target/openai" --install ;; esac
}

# The official clients of OpenAI's API against the gateway of the debug build; FLAG... are those of tests/openai/run.
openai() {
    ready openai
    SEPAL=$target/debug/sepal tests/openai/run "$@" | tee "$log"
    case $(tail -n 1 "$log") in
        *skipped)
            remark=$(tail -n 1 "$log")
            strictly
            ;;
    esac
}

# interop EXECUTABLE FLAG...: the scenarios of the real Petals client; the closing line is kept for the end.
interop() {
    local status=0 sepal=$1
    shift
    ready petals
    SEPAL=$sepal SEPAL_EMU=$target/debug/sepal tests/interop/run --out "$target/interop" "$@" | tee "$log" || status=$?
    tail -n 1 "$log" >"$state/summary"
    return $status
}
