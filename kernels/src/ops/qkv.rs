//! Takes a fused projection apart: per kv head, the queries of its group, then its key, then its
//! value. With one query head per kv head that is BLOOM's layout, with one kv head that of
//! multi-query Falcon.
//!
//! ```text
//! fused [tokens, kv_heads, group + 2, head_dim]  ->  q [tokens, kv_heads, group, head_dim], k and v [tokens, kv_heads, head_dim]
//! ```

use super::{Elements, OpError, check_len};

/// Arguments of the split.
#[derive(Debug)]
pub struct SplitQkv<'a, F: ?Sized> {
    /// The projection `[tokens, kv_heads, group + 2, head_dim]`.
    pub fused: &'a F,
    /// Queries `[tokens, kv_heads, group, head_dim]`.
    pub q: &'a mut F,
    /// Keys `[tokens, kv_heads, head_dim]`.
    pub k: &'a mut F,
    /// Values, shaped as the keys.
    pub v: &'a mut F,
    pub tokens: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Query heads per kv head.
    pub group: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl<F: Elements + ?Sized> SplitQkv<'_, F> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        let kv = self.kv_heads * self.head_dim;
        let widths = [
            ("fused", self.fused.len(), kv * (self.group + 2)),
            ("q", self.q.len(), kv * self.group),
            ("k", self.k.len(), kv),
            ("v", self.v.len(), kv),
        ];
        widths.into_iter().try_for_each(|(what, has, width)| {
            check_len("split qkv", what, has, self.tokens, width)
        })
    }
}

/// The definition, also the fast path: it only moves values.
pub fn reference(args: SplitQkv<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    let (d, q) = (args.head_dim, args.group * args.head_dim);
    let heads = args.tokens * args.kv_heads;
    for head in 0..heads {
        let fused = &args.fused[head * (q + 2 * d)..(head + 1) * (q + 2 * d)];
        args.q[head * q..(head + 1) * q].copy_from_slice(&fused[..q]);
        args.k[head * d..(head + 1) * d].copy_from_slice(&fused[q..q + d]);
        args.v[head * d..(head + 1) * d].copy_from_slice(&fused[q + d..]);
    }
    Ok(())
}

/// Arguments of the inverse: queries, keys and values (or their gradients) into the fused layout.
#[derive(Debug)]
pub struct JoinQkv<'a, F: ?Sized> {
    /// Output `[tokens, kv_heads, group + 2, head_dim]`.
    pub fused: &'a mut F,
    /// `[tokens, kv_heads, group, head_dim]`.
    pub q: &'a F,
    /// `[tokens, kv_heads, head_dim]`.
    pub k: &'a F,
    /// Shaped as `k`.
    pub v: &'a F,
    pub tokens: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Query heads per kv head.
    pub group: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl<F: Elements + ?Sized> JoinQkv<'_, F> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        let (d, q) = (self.head_dim, self.group * self.head_dim);
        let heads = self.tokens * self.kv_heads;
        check_len("join qkv", "fused", self.fused.len(), heads, q + 2 * d)?;
        check_len("join qkv", "q", self.q.len(), heads, q)?;
        check_len("join qkv", "k", self.k.len(), heads, d)?;
        check_len("join qkv", "v", self.v.len(), heads, d)
    }
}

/// The definition of [`JoinQkv`], also the fast path.
pub fn reference_join(args: JoinQkv<'_, [f32]>) -> Result<(), OpError> {
    args.check()?;
    let (d, q) = (args.head_dim, args.group * args.head_dim);
    let heads = args.tokens * args.kv_heads;
    for head in 0..heads {
        let fused = &mut args.fused[head * (q + 2 * d)..(head + 1) * (q + 2 * d)];
        fused[..q].copy_from_slice(&args.q[head * q..(head + 1) * q]);
        fused[q..q + d].copy_from_slice(&args.k[head * d..(head + 1) * d]);
        fused[q + d..].copy_from_slice(&args.v[head * d..(head + 1) * d]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_of_a_group_come_before_its_key_and_value() {
        let fused: Vec<f32> = (0..16).map(|v| v as f32).collect();
        let (mut q, mut k, mut v) = ([f32::NAN; 8], [f32::NAN; 4], [f32::NAN; 4]);
        let args = SplitQkv {
            fused: &fused[..],
            q: &mut q[..],
            k: &mut k[..],
            v: &mut v[..],
            tokens: 1,
            kv_heads: 2,
            group: 2,
            head_dim: 2,
        };
        reference(args).unwrap();
        assert_eq!(q, [0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0, 11.0]);
        assert_eq!((k, v), ([4.0, 5.0, 12.0, 13.0], [6.0, 7.0, 14.0, 15.0]));
        let mut joined = [f32::NAN; 16];
        reference_join(JoinQkv {
            fused: &mut joined[..],
            q: &q,
            k: &k,
            v: &v,
            tokens: 1,
            kv_heads: 2,
            group: 2,
            head_dim: 2,
        })
        .unwrap();
        assert_eq!(joined, fused[..]);
        let short = SplitQkv {
            fused: &fused[..15],
            q: &mut q[..],
            k: &mut k[..],
            v: &mut v[..],
            tokens: 1,
            kv_heads: 2,
            group: 2,
            head_dim: 2,
        };
        assert!(matches!(reference(short), Err(OpError::Short { what: "fused", .. })));
    }
}
