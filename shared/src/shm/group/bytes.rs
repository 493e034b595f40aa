//! Numbers as the bytes that cross between ranks.

/// The bytes of `values`.
pub(super) fn of(values: &[f32]) -> &[u8] {
    // SAFETY: a number has no padding, bytes need no alignment, and the length is that of `values`.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of `values`, to be overwritten.
pub(super) fn of_mut(values: &mut [f32]) -> &mut [u8] {
    let len = size_of_val(values);
    // SAFETY: as in of(); any bytes are numbers, and `&mut` makes this the only reference.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), len) }
}
