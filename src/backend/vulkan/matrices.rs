//! Cooperative matrices: which of a device's shapes products of halves are made of, and how a group of threads shares them.

use ash::vk;

use super::api::{self, Api, has};

/// Outputs of a group of threads with few rows of x, those of all ranges together, and ranges: kernels/vulkan/half_product.glsl.
const FEW_OUTPUTS: u32 = 32;
const OUTPUTS: u32 = 128;
const RANGES: u32 = 4;
/// Rows of x of a group with few, and with many.
pub(super) const FEW: u32 = 16;
/// Threads of a group.
const THREADS: u32 = 256;
/// Columns that have one scale at least.
const CHUNK: u32 = 32;
/// Bytes that a group shares: tiles of both factors, scales, where rows of x begin.
const SHARED_BYTES: u32 = 9 * 16 * (OUTPUTS + 64) + 4 * (2 * OUTPUTS + 64);

/// A shape of matrices [M, K] · [K, N] of halves, added up as f32, on subgroups of so many lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Matrices {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub lanes: u32,
}

impl Matrices {
    /// The largest shape of a device that the kernels can be made of; `None` if it has none, or lacks what comes with them.
    pub fn of(
        api: &Api,
        physical: vk::PhysicalDevice,
        properties: &vk::PhysicalDeviceProperties,
        offered: &[vk::ExtensionProperties],
        lanes: u32,
    ) -> Option<Matrices> {
        let wanted = [
            ash::khr::cooperative_matrix::NAME,
            ash::khr::shader_float16_int8::NAME,
            ash::khr::vulkan_memory_model::NAME,
        ];
        let enough = properties.limits.max_compute_shared_memory_size >= SHARED_BYTES;
        if properties.api_version < api::VERSION || !enough || !wanted.iter().all(|name| has(offered, name)) {
            return None;
        }
        let mut matrices = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default();
        let mut halves = vk::PhysicalDeviceShaderFloat16Int8Features::default();
        let mut model = vk::PhysicalDeviceVulkanMemoryModelFeatures::default();
        let mut features = vk::PhysicalDeviceFeatures2::default()
            .push_next(&mut matrices)
            .push_next(&mut halves)
            .push_next(&mut model);
        // SAFETY: the device speaks Vulkan 1.1 and has the extensions of the structures.
        unsafe { api.instance.get_physical_device_features2(physical, &mut features) };
        // With this model other kernels' atomics, which are those of a group, need the device's scope.
        let models = [model.vulkan_memory_model, model.vulkan_memory_model_device_scope];
        if [matrices.cooperative_matrix, halves.shader_float16].iter().chain(&models).any(|&has| has == vk::FALSE) {
            return None;
        }
        let instance = ash::khr::cooperative_matrix::Instance::new(&api.entry, &api.instance);
        // SAFETY: the device has the extension.
        let shapes = unsafe { instance.get_physical_device_cooperative_matrix_properties(physical) }.ok()?;
        largest(&shapes, lanes)
    }

    /// Subgroups that stand side by side over so many rows of x, so that each has about as many outputs as rows.
    pub fn across(self, rows: u32) -> u32 {
        let (outputs, planes) = if rows > FEW { (OUTPUTS, 1) } else { (FEW_OUTPUTS, RANGES) };
        let of_plane = THREADS / self.lanes / planes;
        let (down, beside) = (outputs / self.m, rows / self.n);
        let mut across = 1;
        while 2 * across <= beside.min(of_plane) && 4 * across * across * down <= of_plane * beside {
            across *= 2;
        }
        across
    }

    /// Constants 2 to 6 of the kernels.
    pub fn constants(self, rows: u32) -> [u32; 5] {
        [self.m, self.n, self.k, self.lanes, self.across(rows)]
    }
}

/// The largest of shapes that the kernels can be made of.
fn largest(shapes: &[vk::CooperativeMatrixPropertiesKHR<'_>], lanes: u32) -> Option<Matrices> {
    let (half, float) = (vk::ComponentTypeKHR::FLOAT16, vk::ComponentTypeKHR::FLOAT32);
    let of_halves = |shape: &&vk::CooperativeMatrixPropertiesKHR<'_>| {
        [shape.a_type, shape.b_type] == [half; 2]
            && [shape.c_type, shape.result_type] == [float; 2]
            && shape.scope == vk::ScopeKHR::SUBGROUP
            && shape.saturating_accumulation == vk::FALSE
    };
    let fits = |of: &Matrices| {
        let divides = |part: u32, whole: u32| part.is_power_of_two() && whole.is_multiple_of(part);
        // Rows of a tile begin at whole vec4s, and results of a tile of each subgroup stand where weights did.
        divides(of.m, FEW_OUTPUTS)
            && of.m >= 4
            && divides(of.n, FEW)
            && divides(of.k, CHUNK)
            && of.k >= 8
            && divides(of.lanes, THREADS / RANGES)
            && 4 * (THREADS / of.lanes) * of.m * of.n <= 9 * 16 * OUTPUTS
    };
    let shapes = shapes.iter().filter(of_halves);
    let shapes = shapes.map(|shape| Matrices { m: shape.m_size, n: shape.n_size, k: shape.k_size, lanes });
    shapes.filter(fits).max_by_key(|of| (of.m * of.n * of.k, of.m))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(m: u32, n: u32, k: u32) -> vk::CooperativeMatrixPropertiesKHR<'static> {
        vk::CooperativeMatrixPropertiesKHR::default()
            .m_size(m)
            .n_size(n)
            .k_size(k)
            .a_type(vk::ComponentTypeKHR::FLOAT16)
            .b_type(vk::ComponentTypeKHR::FLOAT16)
            .c_type(vk::ComponentTypeKHR::FLOAT32)
            .result_type(vk::ComponentTypeKHR::FLOAT32)
            .scope(vk::ScopeKHR::SUBGROUP)
    }

    #[test]
    fn the_largest_shape_that_fits_is_taken() {
        let of = |shapes: &[vk::CooperativeMatrixPropertiesKHR<'_>], lanes| {
            largest(shapes, lanes).map(|Matrices { m, n, k, .. }| [m, n, k])
        };
        assert_eq!(of(&[shape(16, 8, 8), shape(16, 16, 16), shape(16, 8, 16)], 32), Some([16, 16, 16]));
        assert_eq!(of(&[shape(8, 8, 8)], 8), Some([8, 8, 8]));
        assert_eq!(of(&[shape(64, 16, 16), shape(16, 32, 16), shape(16, 16, 64), shape(16, 16, 4)], 32), None);
        assert_eq!(of(&[shape(24, 16, 16), shape(32, 16, 16)], 32), Some([32, 16, 16]));
        // Results of all subgroups would not stand where weights did.
        assert_eq!(of(&[shape(32, 16, 16), shape(8, 16, 16)], 8), Some([8, 16, 16]));
        // Other types, sums that stop at the largest number, other scopes, subgroups that are too large.
        let halves = vk::ComponentTypeKHR::FLOAT16;
        let others = [
            shape(16, 16, 16).a_type(vk::ComponentTypeKHR::FLOAT32),
            shape(16, 16, 16).c_type(halves).result_type(halves),
            shape(16, 16, 16).saturating_accumulation(true),
            shape(16, 16, 16).scope(vk::ScopeKHR::WORKGROUP),
        ];
        assert_eq!(of(&others, 32), None);
        assert_eq!(of(&[shape(16, 16, 16)], 64), Some([16, 16, 16]));
        assert_eq!(of(&[shape(16, 16, 16)], 128), None);
        assert_eq!(of(&[shape(16, 16, 16)], 0), None);
    }

    /// Every tile of a group's outputs and rows belongs to one subgroup.
    #[test]
    fn subgroups_share_a_group_without_rest() {
        for lanes in [4, 8, 16, 32, 64] {
            for (m, n) in [(8, 8), (8, 16), (16, 8), (16, 16), (32, 8), (4, 4), (32, 16), (32, 4)] {
                let matrices = Matrices { m, n, k: 16, lanes };
                for (rows, outputs, planes) in [(16, 32, 4), (64, 128, 1)] {
                    let (of_plane, across) = (THREADS / lanes / planes, matrices.across(rows));
                    let down = (of_plane / across).min(outputs / m);
                    assert!(down > 0 && across <= rows / n, "{matrices:?} {rows}: {across} across, {down} down");
                    assert!((outputs / m).is_multiple_of(down) && (rows / n).is_multiple_of(across), "{matrices:?}");
                }
            }
        }
        let of = |lanes, rows| Matrices { m: 16, n: 16, k: 16, lanes }.across(rows);
        assert_eq!([of(32, 64), of(64, 64), of(32, 16), of(16, 64)], [2, 1, 1, 2]);
    }
}
