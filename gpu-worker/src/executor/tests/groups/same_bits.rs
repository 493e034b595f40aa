//! A group gives the bits of a worker alone, and every rank has the same KV pages.

use super::*;

/// Tensors beside those of the harness.
fn extra_slot(number: u64, len: u64) -> SlotRef {
    SlotRef { offset: (3 << 20) + number * 16384, len }
}

/// Gradients of a forward with prompts.
fn backward(netd: &Netd, limits: &JobLimits, tokens: usize, seed: usize) -> JobBody {
    let mut body = netd.job(WorkKind::Backward, limits, 1, &input(tokens, seed));
    let prompt_tokens = tokens.min(3);
    let element = limits.dtype.size_bytes() as u64;
    let prompt_bytes = u64::from(BLOCKS) * prompt_tokens as u64 * 64 * element;
    let [gradient, prompts] = [extra_slot(0, body.input.len), extra_slot(1, prompt_bytes)];
    netd.write(gradient, limits.dtype, &input(tokens, seed + 1));
    netd.write(prompts, limits.dtype, &input(BLOCKS as usize * prompt_tokens, seed + 2));
    body.output_gradient = Some(gradient);
    body.prompts = Some(Prompts { slot: prompts, batch: 1, tokens: prompt_tokens as u32 });
    body.prompt_gradient = Some(extra_slot(2, prompt_bytes));
    body
}

/// One job of every kind after the other; all outputs in a row.
fn one_of_each(netd: &mut Netd, limits: &JobLimits) -> Vec<u8> {
    let mut free = shuffled_pages();
    let batch = netd.job(WorkKind::Forward, limits, 2, &input(58, 5));
    let mut out = netd.call(&batch).unwrap();

    let gradients = backward(netd, limits, 50, 7);
    out.extend(netd.call(&gradients).unwrap());
    out.extend(netd.read(gradients.prompt_gradient.unwrap()));

    let mut session = Session::new();
    let parts = cut(&input(41, 3), &[36, 1, 1, 3]);
    out.extend(decode(netd, limits, &mut session, &mut free, &parts));

    let prompts = extra_slot(3, u64::from(BLOCKS) * 5 * 64 * limits.dtype.size_bytes() as u64);
    netd.write(prompts, limits.dtype, &input(BLOCKS as usize * 5, 11));
    let mut step = Session::new().step(netd, limits, &mut free, &input(12, 12));
    step.prompts = Some(Prompts { slot: prompts, batch: 1, tokens: 5 });
    out.extend(netd.call(&step).unwrap());

    // Two beams that share the pages before the last, then a step back to an earlier prefix.
    for seed in [21, 22] {
        let mut beam = session.clone();
        let (copy, last) = (free.pop().unwrap(), beam.table.len() - 1);
        let tokens = beam.prefix - (last * shared::model::PAGE_TOKENS) as u32;
        beam.copies = vec![PageCopy { source: beam.table[last], destination: copy, tokens }];
        beam.table[last] = copy;
        out.extend(decode(netd, limits, &mut beam, &mut free, &[input(1, seed), input(1, seed)]));
    }
    session.prefix = 20;
    out.extend(decode(netd, limits, &mut session, &mut free, &[input(2, 30), input(30, 31)]));
    out
}

#[test]
fn two_and_three_ranks_give_the_bits_of_one_and_have_its_pages() {
    for dtype in [DType::F32, DType::Bf16] {
        let model = Model::new(dtype);
        let limits = model.limits();
        let (mut alone, mut alone_pages) = (Vec::new(), Vec::new());
        for world in [1, 2, 3] {
            let kvs = kv_segments(&model, world);
            let (ends, out) = with_group(&model, &kvs, |netd, _| one_of_each(netd, &limits));
            assert_eq!(ends, vec![Exit::clean(); world]);
            if world == 1 {
                (alone, alone_pages) = (out, contents(&kvs[0]));
                assert!(alone_pages != contents(&kv_segment(model.facts())), "no page was written");
                continue;
            }
            assert!(out == alone, "{dtype}, {world} ranks");
            for (rank, kv) in kvs.iter().enumerate() {
                assert!(contents(kv) == alone_pages, "{dtype}, rank {rank} of {world}");
            }
        }
    }
}

/// A chain of random numbers.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % limit
    }
}

const SESSIONS: usize = 6;

/// Steps of several sessions, forwards and gradients, of which many are in flight at once. What is
/// submitted depends on the seed alone; all outputs in the order of submission.
fn interleaved(netd: &mut Netd, limits: &JobLimits, seed: u64) -> Vec<Vec<u8>> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ seed << 20);
    let mut free = shuffled_pages();
    let mut sessions = vec![Session::new(); SESSIONS];
    let mut flying: Vec<(Option<usize>, JobId, SlotRef, usize)> = Vec::new();
    let mut outputs = vec![Vec::new(); 60];
    let mut gradients = false;
    for number in 0..outputs.len() {
        let who = random.below(SESSIONS + 2);
        let is_busy = |who: usize| flying.iter().any(|job| job.0 == Some(who));
        if is_busy(who) || flying.len() == 12 {
            let (_, id, slot, which) = flying.remove(random.below(flying.len()));
            netd.wake();
            netd.answer(id).unwrap();
            outputs[which] = netd.read(slot);
        }
        if who < SESSIONS && !flying.iter().any(|job| job.0 == Some(who)) {
            let tokens = if random.below(3) == 0 { 1 + random.below(40) } else { 1 };
            let tokens = tokens.min(140 - (sessions[who].prefix as usize).min(139));
            let body = sessions[who].step(netd, limits, &mut free, &input(tokens, number));
            let id = netd.push(&body);
            flying.push((Some(who), id, body.output, number));
        } else if who == SESSIONS {
            let body = netd.job(WorkKind::Forward, limits, 1, &input(1 + random.below(60), number));
            flying.push((None, netd.push(&body), body.output, number));
        } else if who > SESSIONS && !gradients {
            // One alone: its tensors have fixed slots.
            gradients = true;
            let body = backward(netd, limits, 1 + random.below(50), number);
            flying.push((None, netd.push(&body), body.output, number));
        }
    }
    netd.wake();
    for (_, id, slot, which) in flying {
        netd.answer(id).unwrap();
        outputs[which] = netd.read(slot);
    }
    outputs
}

#[test]
fn sessions_that_interleave_in_any_way_have_the_bits_and_pages_of_a_worker_alone() {
    let model = Model::new(DType::Bf16);
    let limits = model.limits();
    for seed in 0..4 {
        let mut alone = None;
        for world in [1, 2, 3] {
            let kvs = kv_segments(&model, world);
            let (ends, out) = with_group(&model, &kvs, |netd, _| interleaved(netd, &limits, seed));
            assert_eq!(ends, vec![Exit::clean(); world]);
            let (bits, first) = alone.get_or_insert_with(|| (out.clone(), contents(&kvs[0])));
            assert!(out == *bits, "seed {seed}, {world} ranks");
            assert!(kvs.iter().all(|kv| contents(kv) == *first), "seed {seed}, {world} ranks");
        }
    }
}

#[test]
fn followers_write_nothing_to_the_arena() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    let theirs = LinkParts::new(FIRST, Generation(2));
    let kvs = kv_segments(&model, 2);
    let (ends, out) = with_group(&model, &kvs, |_, controls| {
        // The follower gets an arena of its own, in which all inputs are zero.
        let parts = LinkParts::new(FIRST, Generation(2));
        controls.link_followers(&theirs);
        controls.link_rank_0(&parts);
        one_of_each(&mut Netd::of(parts), &limits)
    });
    assert_eq!(ends[1], Exit::clean());
    assert!(out.iter().any(|byte| *byte != 0));
    assert!(contents(&kvs[0]) != contents(&kvs[1]), "the follower read the arena of rank 0");
    assert!(contents(&theirs.arena).iter().all(|byte| *byte == 0));
}

#[test]
fn a_new_netd_replaces_the_old_one_on_every_rank() {
    let model = Model::new(DType::F32);
    let limits = model.limits();
    let mut expected = Vec::new();
    with_executor(&model, &kv_segment(model.facts()), |netd, _| {
        expected = one_of_each(netd, &limits);
    });
    for order in 0..3 {
        let kvs = kv_segments(&model, 3);
        let (ends, out) = with_group(&model, &kvs, |old, controls| {
            for seed in 0..60 {
                netd_forward(old, &limits, seed);
            }
            old.wake();
            // The one in between never gets a job.
            let [between, new] = [2, 3].map(|netd| LinkParts::new(FIRST, Generation(netd)));
            if order == 0 {
                controls.link(&between);
                controls.link(&new);
            } else {
                controls.link_followers(&between);
                controls.link_followers(&new);
                if order == 1 {
                    controls.link_rank_0(&between);
                }
                controls.link_rank_0(&new);
            }
            let bell = another(&new.submission_bell);
            let out = one_of_each(&mut Netd::of(new), &limits);
            controls.rank_0.send(ExecutorCommand::Drain).unwrap();
            bell.ring().unwrap();
            out
        });
        assert_eq!(ends, vec![Exit::clean(); 3], "order {order}");
        assert!(out == expected, "order {order}");
        assert!(contents(&kvs[1]) == contents(&kvs[0]) && contents(&kvs[2]) == contents(&kvs[0]));
    }
}
