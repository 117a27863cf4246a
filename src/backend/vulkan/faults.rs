//! Faults of the API, by the names of calls and codes.

use ash::vk;

use crate::error::{Fault, FaultKind, Place};

/// The API's name in messages.
pub(super) const API: &str = "Vulkan";

/// A fault of the API as a whole.
pub(super) fn api_fault(reason: String) -> Fault {
    Fault::new(Place::default(), FaultKind::GpuApi { api: API, reason })
}

/// A failed call; `doing` completes "cannot …".
pub(super) fn call_fault(device: &str, call: &'static str, doing: String, error: vk::Result) -> Fault {
    let (device, code) = (device.to_owned(), code(error));
    Fault::new(Place::default(), FaultKind::GpuCall { device, call, doing, code, launched: None })
}

/// The name of a code: `VK_ERROR_DEVICE_LOST`; of one that nobody knows its number.
pub(super) fn code(error: vk::Result) -> String {
    let name = format!("{error:?}");
    if name.starts_with(|c: char| c.is_ascii_uppercase()) { format!("VK_{name}") } else { format!("code {name}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_names() {
        assert_eq!(code(vk::Result::ERROR_DEVICE_LOST), "VK_ERROR_DEVICE_LOST");
        assert_eq!(code(vk::Result::TIMEOUT), "VK_TIMEOUT");
        assert_eq!(code(vk::Result::from_raw(-77)), "code -77");
        assert_eq!(
            call_fault("llvmpipe", "vkQueueSubmit", "run add".to_owned(), vk::Result::ERROR_DEVICE_LOST).to_string(),
            "llvmpipe: cannot run add: vkQueueSubmit says VK_ERROR_DEVICE_LOST"
        );
    }
}
