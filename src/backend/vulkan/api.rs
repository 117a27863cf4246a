//! The Vulkan library, an instance of it, and what its validation layers say.

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, PoisonError};

use ash::vk;

use super::faults::{API, api_fault, code};
use crate::error::{Fault, FaultKind, Place, Result};

/// What the program asks of the API: what came with version 1.1.
pub(super) const VERSION: u32 = vk::API_VERSION_1_1;
/// The loader's file, as it is looked for.
const LIBRARY: &str = if cfg!(windows) {
    "vulkan-1.dll"
} else if cfg!(target_os = "macos") {
    "libvulkan.dylib"
} else {
    "libvulkan.so.1"
};
const VALIDATION_LAYER: &CStr = c"VK_LAYER_KHRONOS_validation";

/// The library with an instance.
pub(super) struct Api {
    pub instance: ash::Instance,
    messenger: Option<(ash::ext::debug_utils::Instance, vk::DebugUtilsMessengerEXT)>,
    messages: Box<Messages>,
    // The library stays loaded as long as anything of it is used.
    pub entry: ash::Entry,
}

#[derive(Default)]
struct Messages(Mutex<Vec<String>>);

impl Api {
    /// Loads the library and makes an instance, with the validation layers if they are asked for.
    pub fn load(validation: bool) -> Result<Api> {
        // SAFETY: the loader is the system's own; its initializers are trusted like those of every library of the system.
        let entry = unsafe { ash::Entry::load() }.map_err(no_library)?;
        // SAFETY: the library was loaded.
        let version = unsafe { entry.try_enumerate_instance_version() }
            .map_err(|error| api_fault(format!("vkEnumerateInstanceVersion: {}", code(error))))?
            .unwrap_or(vk::API_VERSION_1_0);
        if version < VERSION {
            return Err(api_fault(format!("the loader knows Vulkan {}, expected at least 1.1", version_text(version))));
        }
        if validation {
            find_layer(&entry)?;
        }
        let messages = Box::<Messages>::default();
        let instance = create(&entry, validation, &messages)?;
        let mut api = Api { instance, messenger: None, messages, entry };
        if validation {
            let loader = ash::ext::debug_utils::Instance::new(&api.entry, &api.instance);
            // SAFETY: the messages outlive the messenger, which is destroyed when this value is dropped.
            let made = unsafe { loader.create_debug_utils_messenger(&messenger(&api.messages), None) };
            let made = made.map_err(|error| api_fault(format!("vkCreateDebugUtilsMessengerEXT: {}", code(error))))?;
            api.messenger = Some((loader, made));
        }
        Ok(api)
    }

    /// Takes what the validation layers have said.
    pub fn messages(&self) -> Vec<String> {
        std::mem::take(&mut self.messages.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        if let Some((loader, messenger)) = self.messenger.take() {
            // SAFETY: it was made by this loader and is destroyed once.
            unsafe { loader.destroy_debug_utils_messenger(messenger, None) };
        }
        // SAFETY: whatever was made from the instance holds this value, so it is gone.
        unsafe { self.instance.destroy_instance(None) };
    }
}

fn no_library(error: ash::LoadingError) -> Fault {
    let message = match error {
        ash::LoadingError::LibraryLoadFailure(error) => error.to_string(),
        ash::LoadingError::MissingEntryPoint(error) => error.to_string(),
    };
    Fault::new(Place::default(), FaultKind::GpuLibrary { api: API, library: LIBRARY, message })
}

/// Refuses validation where the layers are not installed: silence would be taken for approval.
fn find_layer(entry: &ash::Entry) -> Result<()> {
    // SAFETY: the library was loaded.
    let layers = unsafe { entry.enumerate_instance_layer_properties() }.unwrap_or_default();
    if layers.iter().any(|layer| layer.layer_name_as_c_str() == Ok(VALIDATION_LAYER)) {
        return Ok(());
    }
    Err(api_fault("validation is asked for, and VK_LAYER_KHRONOS_validation is not installed".to_owned()))
}

fn create(entry: &ash::Entry, validation: bool, messages: &Messages) -> Result<ash::Instance> {
    let application = vk::ApplicationInfo::default().application_name(c"coliconv").api_version(VERSION);
    // SAFETY: the library was loaded.
    let offered = unsafe { entry.enumerate_instance_extension_properties(None) }.unwrap_or_default();
    let portable = has(&offered, ash::khr::portability_enumeration::NAME);
    let mut extensions: Vec<*const c_char> = Vec::new();
    let mut layers: Vec<*const c_char> = Vec::new();
    let mut flags = vk::InstanceCreateFlags::empty();
    if portable {
        extensions.push(ash::khr::portability_enumeration::NAME.as_ptr());
        flags |= vk::InstanceCreateFlags::ENUMERATE_PORTABILITY_KHR;
    }
    let checks = [vk::ValidationFeatureEnableEXT::SYNCHRONIZATION_VALIDATION];
    let mut features = vk::ValidationFeaturesEXT::default().enabled_validation_features(&checks);
    let mut early = messenger(messages);
    let mut info = vk::InstanceCreateInfo::default().application_info(&application).flags(flags);
    if validation {
        layers.push(VALIDATION_LAYER.as_ptr());
        extensions.extend([ash::ext::debug_utils::NAME.as_ptr(), ash::ext::validation_features::NAME.as_ptr()]);
        info = info.push_next(&mut features).push_next(&mut early);
    }
    info = info.enabled_extension_names(&extensions).enabled_layer_names(&layers);
    // SAFETY: everything that `info` points to lives until the call returns, and `messages` longer.
    unsafe { entry.create_instance(&info, None) }
        .map_err(|error| api_fault(format!("vkCreateInstance: {}{}", code(error), why_no_instance(error))))
}

fn why_no_instance(error: vk::Result) -> &'static str {
    match error {
        vk::Result::ERROR_INCOMPATIBLE_DRIVER => ": no driver for Vulkan is installed",
        _ => "",
    }
}

/// Whether an extension is among those offered.
pub(super) fn has(offered: &[vk::ExtensionProperties], name: &CStr) -> bool {
    offered.iter().any(|extension| extension.extension_name_as_c_str() == Ok(name))
}

/// `1.3.230`.
pub(super) fn version_text(version: u32) -> String {
    let (major, minor) = (vk::api_version_major(version), vk::api_version_minor(version));
    format!("{major}.{minor}.{}", vk::api_version_patch(version))
}

fn messenger(messages: &Messages) -> vk::DebugUtilsMessengerCreateInfoEXT<'_> {
    use vk::{DebugUtilsMessageSeverityFlagsEXT as Severity, DebugUtilsMessageTypeFlagsEXT as Type};
    vk::DebugUtilsMessengerCreateInfoEXT::default()
        .message_severity(Severity::WARNING | Severity::ERROR)
        .message_type(Type::VALIDATION)
        .pfn_user_callback(Some(note))
        .user_data((&raw const *messages).cast_mut().cast())
}

/// Notes a message of the validation layers.
///
/// # Safety
///
/// `data` is null or valid, and `messages` is the [`Messages`] that the messenger was made with.
unsafe extern "system" fn note(
    _: vk::DebugUtilsMessageSeverityFlagsEXT,
    _: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    messages: *mut c_void,
) -> vk::Bool32 {
    // SAFETY: the messenger was made with a pointer to `Messages`, which outlive it and are only ever shared.
    let messages = unsafe { &*messages.cast_const().cast::<Messages>() };
    // SAFETY: the layers give valid data, whose message ends with a zero.
    let text = unsafe { data.as_ref().and_then(|data| data.message_as_c_str()) };
    let text = text.map_or_else(|| "a message without text".into(), |text| text.to_string_lossy().into_owned());
    messages.0.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    vk::FALSE
}
