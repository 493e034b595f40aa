//! What one server of a chain was sent, so that another can take its place: the inputs of every
//! step, and how the rows were reordered between them. Pure.
//!
//! # Discrepancies
//! Petals' client keeps the inputs as they were sent (`client/inference_session.py`) and replays
//! them unordered, so that a beam search goes wrong after a failover; here each input is replayed
//! in the rows that the cache has now.

use crate::states::Hidden;

/// Row `order[i]` becomes row `i`.
type Order = Vec<usize>;

#[derive(Clone, Debug)]
struct SentStep {
    /// How the rows before this part were reordered when it came.
    order: Option<Order>,
    hidden: Hidden,
}

/// Inputs in the order in which they came.
#[derive(Clone, Debug, Default)]
pub struct History {
    parts: Vec<SentStep>,
    /// Reordering since the last part: that of steps that were rolled back.
    after: Option<Order>,
}

impl History {
    /// A step that was answered.
    pub fn push(&mut self, order: Option<&[usize]>, hidden: Hidden) {
        let order = compose(self.after.take(), order);
        self.parts.push(SentStep { order, hidden });
    }

    /// Forgets the tokens from `position` on. Rows stay as they are.
    pub fn roll_back(&mut self, position: usize) {
        let mut tokens: usize = self.parts.iter().map(|part| part.hidden.tokens).sum();
        while let Some(last) = self.parts.last_mut() {
            let before = tokens - last.hidden.tokens;
            if before < position {
                last.hidden = last.hidden.first(position - before);
                return;
            }
            tokens = before;
            let order = self.parts.pop().and_then(|part| part.order);
            self.after = compose(order, self.after.take().as_deref());
        }
        self.after = None;
    }

    /// All inputs and then `now`, as one long input for a server that has none of them. `order` is
    /// the reordering that comes with `now`.
    pub fn replay(&self, order: Option<&[usize]>, now: Hidden) -> Hidden {
        let rows = (0..now.rows).collect();
        let mut order = compose(self.after.clone(), order).unwrap_or(rows);
        let mut parts = vec![(now.clone(), (0..now.rows).collect())];
        for part in self.parts.iter().rev() {
            parts.push((part.hidden.clone(), order.clone()));
            order = compose(part.order.clone(), Some(&order)).unwrap_or(order);
        }
        parts.reverse();
        Hidden::join_tokens(&parts).unwrap_or(now)
    }
}

/// `first`, and `then` on what came out.
fn compose(first: Option<Order>, then: Option<&[usize]>) -> Option<Order> {
    match (first, then) {
        (Some(first), Some(then)) => Some(then.iter().map(|&row| first[row]).collect()),
        (first, then) => first.or(then.map(<[usize]>::to_vec)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared::dtype::DType;

    fn states(rows: usize, values: &[f32]) -> Hidden {
        Hidden {
            dtype: DType::F32,
            rows,
            tokens: values.len() / rows,
            bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    }

    /// The cache of a server: per row the values it was sent.
    struct Cache(Vec<Vec<f32>>);

    impl Cache {
        fn step(&mut self, order: Option<&[usize]>, hidden: &Hidden) {
            if let Some(order) = order {
                self.0 = order.iter().map(|&row| self.0[row].clone()).collect();
            }
            for (row, cache) in self.0.iter_mut().enumerate() {
                cache.extend(hidden.rows(row..row + 1).to_f32());
            }
        }

        fn roll_back(&mut self, position: usize) {
            self.0.iter_mut().for_each(|row| row.truncate(position));
        }
    }

    #[test]
    fn a_replay_is_what_the_cache_holds_whatever_happened_before() {
        let (mut history, mut cache) = (History::default(), Cache(vec![Vec::new(); 3]));
        let mut random = 7u32;
        let mut draw = |below: usize| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) as usize % below
        };
        for step in 0..400 {
            let order: Option<Vec<usize>> =
                (draw(2) == 0).then(|| (0..3).map(|_| draw(3)).collect());
            let tokens = 1 + draw(3);
            let values: Vec<f32> = (0..3 * tokens).map(|i| (step * 100 + i) as f32).collect();
            let hidden = states(3, &values);
            let mut expected = Cache(cache.0.clone());
            expected.step(order.as_deref(), &hidden);
            let replay = history.replay(order.as_deref(), hidden.clone());
            assert_eq!(replay.to_f32(), expected.0.concat(), "step {step}");
            history.push(order.as_deref(), hidden);
            cache = expected;
            if draw(4) == 0 {
                let position = draw(cache.0[0].len() + 1);
                history.roll_back(position);
                cache.roll_back(position);
            }
        }
        assert!(history.parts.len() < 400);
    }
}
