# What .ci/run and .ci/long share: stages with their times, and a look at what they leave behind. Sourced, not run.
#
# The caller sets `known` and `stages` and then calls, for each stage, `if wanted NAME; then ...; fi`, and `finish` last.

target=${CARGO_TARGET_DIR:-$PWD/target}
export CARGO_TARGET_DIR=$target CARGO_INCREMENTAL=0 CARGO_TERM_COLOR=never CARGO_TERM_PROGRESS_WHEN=never
unset RUSTFLAGS RUSTDOCFLAGS RUSTC_WORKSPACE_WRAPPER

stage= began=0 table= summary= scratch=
# The release build of this call, if a stage made one: that of an earlier call may be older than its sources.
release=

# One line: what processes of ours and tests leave in folders that belong to all.
shared_files() {
    find /dev/shm /tmp -maxdepth 1 -user "$(id -un)" \
        \( -name 'sepal*' -o -name 'hivemind*' -o -name 'sem.mp-*' -o -name 'torch_*' -o -name '*p2pd*' \) 2>/dev/null | sort
}

start() {
    local name
    for name in $stages; do
        case " $known " in
            *" $name "*) ;;
            *) echo "no stage is called $name" >&2; exit 2 ;;
        esac
    done
    # Paths of sockets are short: they live below this folder.
    scratch=$(mktemp -d /tmp/sepal-ci.XXXXXX)
    mkdir -m 700 "$scratch/tmp" "$scratch/run"
    export TMPDIR=$scratch/tmp XDG_RUNTIME_DIR=$scratch/run
    files_before=$(shared_files)
    trap ended EXIT
}

close_stage() {
    [ -n "$stage" ] || return 0
    local seconds=$((SECONDS - began))
    printf '==> %s took %d s\n' "$stage" $seconds
    table+=$(printf '%-10s %5d s' "$stage" $seconds)$'\n'
    stage=
}

wanted() {
    close_stage
    case " $stages " in
        *" $1 "*) ;;
        *) return 1 ;;
    esac
    stage=$1 began=$SECONDS
    printf '==> %s (at %d s)\n' "$1" $SECONDS
}

# Fails when something is left in the temporary folder of this run, or with our names in folders that belong to all.
finish() {
    local left
    close_stage
    stage=left began=$SECONDS
    # Of the runtime folder of servers only the folders of runs count: its locks stay.
    left=$(find "$scratch/tmp" -mindepth 1 -maxdepth 2; find "$scratch/run" -name '*.d'
        comm -13 <(printf '%s\n' "$files_before") <(shared_files) | grep -vxF "$scratch" || true)
    if [ -n "$left" ]; then
        printf 'left behind:\n%s\n' "$left" >&2
        exit 1
    fi
    close_stage
}

ended() {
    local status=$? failed=$stage
    close_stage >/dev/null
    [ -z "${venv:-}" ] || kill "$venv" 2>/dev/null || true
    printf '%s%-10s %5d s\n' "$table" total $SECONDS
    if [ $status -ne 0 ] && [ -n "$failed" ]; then
        printf '==> stage %s failed with status %d after %d s\n' "$failed" $status $SECONDS >&2
    fi
    # Removed last: what a failed test left is gone with it, but the failure has been told.
    rm -rf "$scratch"
    # The closing line of the interop run stays the last one.
    if [ -n "$summary" ] && { [ $status -eq 0 ] || [ "$failed" = interop ]; }; then
        printf '%s\n' "$summary"
    fi
}

# Runs a command, shows its output, and fails if cargo warned of anything.
without_warnings() {
    local log=$scratch/log status=0
    "$@" 2>&1 | tee "$log" || status=$?
    if grep -q '^warning' "$log"; then
        status=1
    fi
    return $status
}

# Runs the interop scenarios against the release build of this call, if there is one, else the debug build; the closing line is kept
# for the end.
interop() {
    local log=$target/interop.log status=0
    SEPAL=${release:-$target/debug/sepal} SEPAL_EMU=$target/debug/sepal tests/interop/run --out "$target/interop" "$@" | tee "$log" || status=$?
    summary=$(tail -n 1 "$log")
    return $status
}
