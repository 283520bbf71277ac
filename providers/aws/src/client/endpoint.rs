// SPDX-License-Identifier: Apache-2.0
//! Where EC2 answers in a region.

use aws_config::SdkConfig;
use elb::config::endpoint::{DefaultResolver, Params, ResolveEndpoint as _};
use futures::FutureExt as _;

use super::elb;

/// The URL of EC2 in the region of `sdk`. The SDK of `ELBv2` knows the partitions, and AWS names both APIs alike in each: with FIPS,
/// with dual-stack, and without.
pub(super) fn ec2(sdk: &SdkConfig) -> String {
    let region = sdk.region().map_or_else(String::new, ToString::to_string);
    let params = Params::builder()
        .region(region.as_str())
        .use_fips(sdk.use_fips().unwrap_or_default())
        .use_dual_stack(sdk.use_dual_stack().unwrap_or_default())
        .build();
    let found = params
        .ok()
        .and_then(|params| DefaultResolver::new().resolve_endpoint(&params).now_or_never()?.ok())
        .map(|found| found.url().replacen("://elasticloadbalancing", "://ec2", 1));
    // What the SDK does not resolve fails with each request to `ELBv2`, with its reason.
    found.unwrap_or_else(|| format!("https://ec2.{region}.amazonaws.com"))
}

#[cfg(test)]
mod tests {
    use aws_config::Region;

    use super::*;

    #[test]
    fn endpoint_is_the_one_of_the_partition() {
        for (region, fips, dual_stack, wanted) in [
            ("us-east-1", false, false, "https://ec2.us-east-1.amazonaws.com"),
            ("us-east-1", true, false, "https://ec2-fips.us-east-1.amazonaws.com"),
            ("us-east-1", false, true, "https://ec2.us-east-1.api.aws"),
            ("us-east-1", true, true, "https://ec2-fips.us-east-1.api.aws"),
            ("us-gov-west-1", true, false, "https://ec2.us-gov-west-1.amazonaws.com"),
            ("cn-north-1", false, false, "https://ec2.cn-north-1.amazonaws.com.cn"),
            ("us-iso-east-1", false, false, "https://ec2.us-iso-east-1.c2s.ic.gov"),
            ("eusc-de-east-1", false, false, "https://ec2.eusc-de-east-1.amazonaws.eu"),
        ] {
            let mut sdk = SdkConfig::builder().region(Region::new(region));
            sdk.set_use_fips(Some(fips)).set_use_dual_stack(Some(dual_stack));
            assert_eq!(ec2(&sdk.build()), wanted, "{region}, FIPS {fips}, dual-stack {dual_stack}");
        }
    }
}
