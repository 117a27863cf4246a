//! The forward pass on a GPU, through any API: weights as they are stored, activations that stay on the device.
//!
//! [`driver::Driver`] is what an API gives; [`kernels`] names what runs on the device.

pub mod driver;
pub mod kernels;
