/* The protocol of idemp as a model for spin; ../model.md explains it beside the code.
 *
 * Two consumer processes of one consumer, a relay, a cleaner, the database's server and a world in which everything fails.
 * Each alternative of a `do` is one step of a process: what a single call of a port does, taken as a whole. Between two
 * steps anything else may happen, a crash included.
 *
 *     spin -run -noclaim -safety protocol.pml           the promises that hold in every state
 *     spin -DCALM -run -DNFAIR=3 -a -f protocol.pml     the one about what happens in the end
 *
 * -DLATE_CLAIM and the like, before -run, choose a variant, -DACK_BEFORE_COMMIT and the like a mutant: a protocol with one
 * fault. `spin -t -T` with the same -D tells the story that breaks a promise.
 */

#ifndef MESSAGES
#define MESSAGES 1 /* or 2 */
#endif
#ifndef OUTPUTS
#define OUTPUTS 1 /* of each handling, at most 8 */
#endif
#define CONSUMERS 2
#define ALL ((1 << OUTPUTS) - 1) /* outputs are bits: a set of them is a byte */

/* Whether a call may fail and a process may die. With CALM the world calms down at some time: then everything has to end. */
bool calm = false;
#define fails !calm

/* The broker. */
bool queued[MESSAGES] = true; /* a copy is ready to be delivered; several look like one: any number can be made of it */
bool dead[MESSAGES] = false; /* in the dead-letter queue */
byte confirmed[MESSAGES] = 0; /* outputs that it confirmed, whoever sent them */

/* The database, as committed, and who holds what he has not committed yet. */
mtype = { ABSENT, CLAIMED };
mtype inbox[MESSAGES] = ABSENT;
bit body[MESSAGES] = 0; /* the stored outputs' bytes; never changed once committed, nor forgotten by this model */
byte pending[MESSAGES] = 0;
byte quarantined[MESSAGES] = 0; /* of the pending ones */
#define NOBODY 20
#define BROKEN 21 /* a transaction whose client is gone: it will be rolled back */
#define UNANSWERED 22 /* a transaction whose COMMIT was sent and not answered: it may go either way */
byte holder[MESSAGES] = NOBODY;
#define held(m) (holder[m] != NOBODY)

/* Time. */
bool expired[MESSAGES] = false; /* the retention window is over */
bool noticed[MESSAGES] = false; /* ... and the consumers know; only with STALE_HORIZON does that come later */

/* What really happened, for the promises alone. */
byte effects[MESSAGES] = 0; /* how often the handler's work was committed */
#define handled(m) (effects[m] > 0)

/* Where each consumer is with the delivery in its hands. */
mtype = { IDLE, CLAIM, READ, HANDLE, LOOK, COMMIT, DISPATCH, ACK, RETRY, PARK, SETTLED };
mtype at[CONSUMERS] = IDLE;
byte hand[CONSUMERS] = 0;
bool unacked[CONSUMERS] = false; /* the broker delivers it again if this consumer dies */
bool relay_runs; /* whether there is one at all, with its heartbeat */
#define works_on(c, m) (at[c] != IDLE && hand[c] == m)
#define in_hand(m) (works_on(0, m) || works_on(1, m))
#define owed(m) (queued[m] || (unacked[0] && hand[0] == m) || (unacked[1] && hand[1] == m))

#ifdef LATE_CLAIM
#define FIRST HANDLE
#define AFTER_CLAIM COMMIT
#define AFTER_HANDLER CLAIM
#else
#define FIRST CLAIM
#define AFTER_CLAIM HANDLE
#ifdef DISPATCH_BEFORE_COMMIT
#define AFTER_HANDLER DISPATCH
#else
#define AFTER_HANDLER COMMIT
#endif
#endif

/* The promises. Each has a name, which spin prints when it is broken. */
bool effect_once = true, nothing_lost = true, outputs_kept = true, outputs_owed = true;
bool nothing_sent_without_commit = true, same_bytes = true, nothing_marked_without_confirm = true;
bool acked_after_commit = true, acked_after_confirm = true;
#define promise(name, condition) name = (condition); assert(name)

/* In every state: each process looks after each of its steps. */
inline promises_about(m) {
    promise(effect_once, effects[m] <= 1);
    promise(nothing_lost, owed(m) || dead[m] || handled(m));
    promise(outputs_kept, !handled(m) || (confirmed[m] | pending[m]) == ALL);
    promise(outputs_owed, !handled(m) || confirmed[m] == ALL || relay_runs || owed(m))
}

inline promises() {
    promises_about(0);
#if MESSAGES > 1
    promises_about(1)
#endif
}

/* In the end: each message is handled or parked, and each output confirmed or in quarantine. */
#define ended(m) ((handled(m) || dead[m]) && !owed(m) && (!handled(m) || (confirmed[m] | quarantined[m]) == ALL))
#if MESSAGES == 1
#define rest ended(0)
#else
#define rest (ended(0) && ended(1))
#endif
ltl everything_ends { [] (calm -> <> rest) }

/* Steps of the database's server. ------------------------------------------------------------------------------------ */

inline make_committed(m) {
    effects[m] = (effects[m] < 2 -> effects[m] + 1 : 2);
    inbox[m] = CLAIMED;
    holder[m] = NOBODY;
#ifdef OUTPUTS_NOT_STORED
    pending[m] = 0
#else
    pending[m] = ALL
#endif
}

inline roll_back(m) {
    if
    :: holder[m] == me -> holder[m] = NOBODY
    :: else
    fi
}

inline unpend(m, outputs) {
    promise(nothing_marked_without_confirm, ((outputs) & ~confirmed[m]) == 0);
    pending[m] = pending[m] & ~(outputs);
    quarantined[m] = quarantined[m] & ~(outputs)
}

/* Steps of a consumer. ----------------------------------------------------------------------------------------------- */

inline receive(which) {
    m = which;
    hand[me] = which;
    queued[which] = false;
    unacked[me] = true;
    at[me] = FIRST;
#ifdef ACK_BEFORE_COMMIT
    unacked[me] = false;
#endif
    printf("consumer %d: receives message %d\n", me, m)
}

inline claim() {
    if
    :: inbox[m] == CLAIMED -> at[me] = READ
#ifdef LOOK_THEN_INSERT
    :: inbox[m] == ABSENT -> at[me] = AFTER_CLAIM
#else
    :: inbox[m] == ABSENT && !held(m) -> take_claim()
#endif
#ifdef HELD_IS_DUPLICATE
    :: held(m) -> at[me] = READ
#else
    :: held(m) -> at[me] = RETRY; printf("consumer %d: IN_FLIGHT\n", me) /* or it waits, taking no step */
#endif
    :: fails && inbox[m] == ABSENT && !held(m) -> at[me] = READ /* the INSERT was ignored for another reason */
    fi
}

inline take_claim() {
    printf("consumer %d: CLAIMED\n", me);
#ifdef CLAIM_COMMITTED_FIRST
    inbox[m] = CLAIMED;
#else
    holder[m] = me;
#endif
    at[me] = AFTER_CLAIM;
#ifdef AGE_KNOWN
    if
    :: noticed[m] -> roll_back(m); at[me] = PARK; printf("consumer %d: LateMessage\n", me)
    :: else
    fi
#endif
}

#ifdef GONE_IS_DUPLICATE
#define is_duplicate(m) true
#else
#ifdef HELD_IS_DUPLICATE
#define is_duplicate(m) (inbox[m] == CLAIMED || held(m))
#else
#define is_duplicate(m) (inbox[m] == CLAIMED)
#endif
#endif

inline read_outputs() {
    if
    :: !is_duplicate(m) -> at[me] = FIRST
    :: is_duplicate(m) ->
        printf("consumer %d: DUPLICATE\n", me);
        wanted = pending[m] & ~marks[m];
        if
        :: todo = wanted
        :: todo = (inbox[m] == CLAIMED && handled(m) -> ALL : 0) /* redispatch="always" */
        fi;
#ifdef REMAKE_OUTPUTS
        if :: made = 0 :: made = 1 fi;
#else
        made = body[m];
#endif
#ifdef SKIP_DUPLICATES
        todo = 0; wanted = 0;
#endif
        at[me] = DISPATCH
    fi
}

inline run_handler() {
    if
    :: made = 0; at[me] = AFTER_HANDLER
    :: made = 1; at[me] = AFTER_HANDLER /* two runs of a handler may make different outputs */
    :: fails -> roll_back(m); at[me] = LOOK; printf("consumer %d: the handler fails\n", me)
    fi
#ifdef DISPATCH_BEFORE_COMMIT
    ; todo = ALL
#endif
}

/* Early claims need no look: the claim was theirs. After it, the attempts are used up or not. */
inline look() {
    if
#ifdef LATE_CLAIM
    :: inbox[m] == CLAIMED -> at[me] = READ
    :: held(m) -> at[me] = RETRY
    :: inbox[m] == ABSENT && !held(m) -> at[me] = RETRY
    :: inbox[m] == ABSENT && !held(m) -> at[me] = PARK
#else
    :: at[me] = RETRY
    :: at[me] = PARK
#endif
    fi;
    made = 0
}

inline commit() {
    if
    :: body[m] = made;
        make_committed(m);
        printf("consumer %d: COMMIT\n", me);
        to_dispatch()
    :: fails ->
        printf("consumer %d: COMMIT, no answer\n", me);
        body[m] = made;
        holder[m] = UNANSWERED;
#ifdef UNKNOWN_IS_SUCCESS
        to_dispatch()
#else
        made = 0;
#ifdef UNKNOWN_IS_FAILURE
        at[me] = PARK
#else
        at[me] = FIRST
#endif
#endif
    :: fails -> roll_back(m); made = 0; at[me] = FIRST; printf("consumer %d: COMMIT refused\n", me)
    fi
}

inline to_dispatch() {
    todo = ALL;
    wanted = ALL;
    at[me] = DISPATCH
}

inline send_next() {
    next = todo & (~todo + 1); /* in the order of emission: the lowest bit */
    todo = todo & ~next;
    promise(nothing_sent_without_commit, handled(m));
    promise(same_bytes, made == body[m]);
    if
    :: confirmed[m] = confirmed[m] | next;
        marks[m] = marks[m] | next;
        printf("consumer %d: output %d confirmed\n", me, next)
    :: fails -> /* refused, or it arrived and the confirm is lost: the same to both of us */
        missing = missing || (next & wanted);
#ifdef MARK_ON_PUBLISH
        marks[m] = marks[m] | next;
#endif
        printf("consumer %d: output %d not confirmed\n", me, next)
    fi;
    next = 0
}

inline end_dispatch() {
    if
#ifdef DISPATCH_BEFORE_COMMIT
    :: holder[m] == me -> at[me] = COMMIT
#endif
    :: !missing -> at[me] = ACK
#ifdef NO_RELAY_CHECK
    :: missing -> at[me] = ACK
#else
    :: missing && relay_runs -> at[me] = ACK
    :: missing && (fails || !relay_runs) -> at[me] = RETRY /* its heartbeat may be late, too */
#endif
    fi;
    wanted = 0;
    made = 0;
    missing = false
}

inline record() {
    unpend(0, marks[0]);
    marks[0] = 0;
#if MESSAGES > 1
    unpend(1, marks[1]);
    marks[1] = 0;
#endif
    printf("consumer %d: records its marks\n", me)
}

inline acknowledge() {
    promise(acked_after_commit, handled(m));
    promise(acked_after_confirm, confirmed[m] == ALL || relay_runs);
    printf("consumer %d: acks\n", me);
    settled()
}

/* Retry and park: first the copy, then the ack of the original. */
inline copy_away() {
#ifdef COPY_AFTER_ACK
    if
    :: unacked[me] -> unacked[me] = false
    :: else -> make_copy(); settled()
    fi
#else
    make_copy();
    at[me] = SETTLED
#endif
}

inline make_copy() {
    if
    :: at[me] == RETRY -> queued[m] = true; printf("consumer %d: retries\n", me)
#ifndef DROPPED_NOT_PARKED
    :: at[me] == PARK -> dead[m] = true; printf("consumer %d: parks\n", me)
#else
    :: at[me] == PARK
#endif
    fi
}

inline settled() {
    unacked[me] = false;
    hand[me] = 0;
    m = 0;
    at[me] = IDLE
}

/* The process ends at once and another one starts. Its transaction ends later, its delivery comes again. */
inline die() {
    printf("consumer %d: dies\n", me);
    if
    :: holder[m] == me -> holder[m] = BROKEN
    :: else
    fi;
    if
    :: unacked[me] -> queued[m] = true
    :: else
    fi;
    settled();
    todo = 0; wanted = 0; made = 0; missing = false; marks[0] = 0;
#if MESSAGES > 1
    marks[1] = 0;
#endif
}

#if MESSAGES == 1
#define has_marks (marks[0] != 0)
#else
#define has_marks (marks[0] != 0 || marks[1] != 0)
#endif

proctype Consumer(byte me) {
    byte m = 0; /* the message in hand */
    bit made = 0; /* its outputs' bytes, as the handler made or the store kept them */
    byte todo = 0, wanted = 0, next = 0; /* outputs to send, those of them that have no confirm yet, the one being sent */
    bool missing = false; /* one of the wanted has still none */
    byte marks[MESSAGES] = 0; /* confirmed to this process, not recorded yet */
end:
    do
    :: atomic {
        if
        :: at[me] == IDLE && queued[0] -> receive(0)
#if MESSAGES > 1
        :: at[me] == IDLE && queued[1] -> receive(1)
#endif
        :: at[me] == CLAIM -> claim()
        :: at[me] == READ -> read_outputs()
        :: at[me] == HANDLE -> run_handler()
        :: at[me] == LOOK -> look()
        :: at[me] == COMMIT -> commit()
        :: at[me] == DISPATCH && todo != 0 -> send_next()
        :: at[me] == DISPATCH && todo == 0 -> end_dispatch()
        :: at[me] == ACK -> acknowledge()
        :: at[me] == RETRY || at[me] == PARK -> copy_away()
        :: at[me] == SETTLED -> settled()
        :: (at[me] == IDLE || at[me] == ACK) && has_marks -> record()
        :: fails && (at[me] != IDLE || has_marks) -> die()
        fi;
        promises()
    }
    od
}

/* The relay. --------------------------------------------------------------------------------------------------------- */

inline take_pending() {
    leased = pending[m] & ~quarantined[m];
    leased = leased & (~leased + 1);
#ifdef TAKE_DELETES
    pending[m] = pending[m] & ~leased;
#endif
    printf("relay: takes output %d\n", leased)
}

inline relay_publish() {
    promise(nothing_sent_without_commit, handled(m));
    if
    :: confirmed[m] = confirmed[m] | leased; sent = true; printf("relay: output %d confirmed\n", leased)
    :: fails -> printf("relay: output %d not confirmed\n", leased);
#ifdef MARK_ON_PUBLISH
        sent = true
#else
        leased = 0; m = 0
#endif
    :: fails -> quarantined[m] = quarantined[m] | (leased & pending[m]); leased = 0; m = 0; printf("relay: quarantine\n")
    fi
}

inline settle_pending() {
    unpend(m, leased);
    leased = 0; sent = false; m = 0;
    printf("relay: records it\n")
}

proctype Relay() {
    byte m = 0, leased = 0; /* one output at a time */
    bool sent = false;
end:
    do
    :: atomic {
        if
#ifndef RELAY_STUCK
        :: relay_runs && !leased && (pending[0] & ~quarantined[0]) != 0 -> m = 0; take_pending()
#if MESSAGES > 1
        :: relay_runs && !leased && (pending[1] & ~quarantined[1]) != 0 -> m = 1; take_pending()
#endif
#endif
        :: leased && !sent -> relay_publish()
        :: leased && sent -> settle_pending()
        :: fails && leased -> leased = 0; sent = false; m = 0; printf("relay: dies\n") /* its lease ends */
        fi;
        promises()
    }
    od
}

/* The cleaner, the database's server, the world. --------------------------------------------------------------------- */

#ifdef PURGE_YOUNG
#define old(m) true
#else
#define old(m) expired[m]
#endif
#ifdef PURGE_PENDING
#define free(m) true
#else
#define free(m) pending[m] == 0
#endif

inline purge(m) {
    inbox[m] = ABSENT;
    pending[m] = 0;
    quarantined[m] = 0;
    printf("cleaner: purges message %d\n", m);
    promises()
}

inline resolve(m) {
    if
    :: holder[m] == UNANSWERED -> make_committed(m); printf("database: the transaction was committed\n")
    :: holder[m] = NOBODY; printf("database: the transaction is rolled back\n")
    fi;
    promises()
}

#ifdef NO_KEEPALIVE
#define ends_by_itself(m) (holder[m] == UNANSWERED)
#else
#define ends_by_itself(m) (holder[m] == UNANSWERED || holder[m] == BROKEN)
#endif

proctype Cleaner() {
end:
    do
    :: atomic { inbox[0] == CLAIMED && old(0) && free(0) -> purge(0) }
#if MESSAGES > 1
    :: atomic { inbox[1] == CLAIMED && old(1) && free(1) -> purge(1) }
#endif
    od
}

proctype Database() {
end:
    do
    :: atomic { ends_by_itself(0) -> resolve(0) }
#if MESSAGES > 1
    :: atomic { ends_by_itself(1) -> resolve(1) }
#endif
    od
}

/* The window is longer than the redelivery horizon: when it is over, no copy is left anywhere, and none will come. */
#ifdef SHORT_WINDOW
#define may_come(m) true
#define may_expire(m) true
#else
#define may_come(m) !expired[m]
#define may_expire(m) (!queued[m] && !in_hand(m))
#endif

inline expire(m) {
    expired[m] = true;
#ifndef STALE_HORIZON
    noticed[m] = true;
#endif
    printf("world: the window of message %d is over\n", m)
}

/* The broker took a consumer for dead, or an ack was lost, or the producer sent it twice. */
inline redeliver(m) {
    queued[m] = true;
    printf("world: message %d comes again\n", m)
}

inline replay(m) {
    queued[m] = true;
    dead[m] = false;
    printf("world: message %d is replayed\n", m)
}

inline release_quarantined(m) {
    quarantined[m] = 0;
    printf("world: outputs of message %d leave quarantine\n", m)
}

proctype World() {
end:
    do
    :: atomic { fails && !queued[0] && may_come(0) -> redeliver(0) }
    :: atomic { fails && dead[0] && may_come(0) -> replay(0) }
    :: atomic { fails && quarantined[0] -> release_quarantined(0) }
    :: atomic { handled(0) && !expired[0] && may_expire(0) -> expire(0) }
    :: atomic { expired[0] && !noticed[0] -> noticed[0] = true }
#if MESSAGES > 1
    :: atomic { fails && !queued[1] && may_come(1) -> redeliver(1) }
    :: atomic { fails && dead[1] && may_come(1) -> replay(1) }
    :: atomic { fails && quarantined[1] -> release_quarantined(1) }
    :: atomic { handled(1) && !expired[1] && may_expire(1) -> expire(1) }
    :: atomic { expired[1] && !noticed[1] -> noticed[1] = true }
#endif
#ifdef CALM
    :: atomic { fails -> calm = true; printf("world: calm from here on\n") }
#endif
    od
}

init {
    atomic {
        if :: relay_runs = true :: relay_runs = false fi;
        run Consumer(0);
        run Consumer(1);
        run Relay();
        run Cleaner();
        run Database();
        run World()
    }
}
