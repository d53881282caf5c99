"""The profile of compiled steps: kinds of kernels, and the plan that is attached."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.native_profile import OTHER, category_of, plan_of


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("nvjet_sm90_qrtst_256x128_128x4_1x2_h_bz_coopA_TNT", "gemm fp8"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_badd_coopA_NTN", "gemm bf16"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*)", "attention"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_view_where_4", "inductor pointwise"),
        ("triton_per_fused__to_copy_add_div_expand_mul_pow_rsqrt_sum_view_5", "inductor reductions"),
        ("_cast_tile", "our casts"),
        ("_cast_norm_tile", "our norm casts"),
        ("_cast_grads_tile", "our gate casts"),
        ("_partial_amax_batch", "our amax"),
        ("Memset (Device)", "copies"),
        ("unknown", OTHER),
    ],
)
def test_kernels_have_a_category(name: str, category: str) -> None:
    assert category_of(name) == category


def test_options_change_the_plan() -> None:
    plain = plan_of(argparse.Namespace(plan="fp8-train", loss=None, min_macs=None))
    changed = plan_of(argparse.Namespace(plan="fp8-train", loss="chunked", min_macs=0))
    assert plain is not None
    assert changed is not None
    assert (plain.declared_loss, changed.declared_loss) == (None, "chunked")
    assert changed.to_dict()["execution"]["min_macs"] == 0
    assert changed.to_dict()["rules"] == plain.to_dict()["rules"]
    assert plan_of(argparse.Namespace(plan="none", loss=None, min_macs=None)) is None
