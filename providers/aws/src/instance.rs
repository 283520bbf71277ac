// SPDX-License-Identifier: Apache-2.0
//! What the instance on which the controller runs says of itself, over `IMDSv2`.

use aws_config::imds::Client;
use steerage_model::chain;

use crate::config::{AwsArgs, ConfigError};

impl AwsArgs {
    /// With the VPC of the instance, if the flag does not name one.
    pub async fn with_vpc(self) -> Result<Self, ConfigError> {
        self.with_vpc_from(&Client::builder().build()).await
    }

    async fn with_vpc_from(self, metadata: &Client) -> Result<Self, ConfigError> {
        let is_set = |flag: &Option<String>| flag.as_ref().is_some_and(|value| !value.is_empty());
        // A flag that nothing else can say is missed at once.
        if is_set(&self.aws_vpc_id) || !is_set(&self.aws_cluster_name) {
            return Ok(self);
        }
        Ok(Self { aws_vpc_id: Some(vpc(metadata).await.map_err(ConfigError::NoVpc)?), ..self })
    }
}

/// The VPC of the first network interface.
async fn vpc(metadata: &Client) -> Result<String, String> {
    let get = async |path: String| {
        let found = metadata.get(path).await.map_err(|error| chain(&error))?;
        Ok::<_, String>(String::from(found).trim().to_owned())
    };
    let mac = get("/latest/meta-data/mac".to_owned()).await?;
    get(format!("/latest/meta-data/network/interfaces/macs/{mac}/vpc-id")).await
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// Answers as `IMDSv2` does: nothing without a token.
    async fn serve(listener: TcpListener) {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                match stream.read_u8().await {
                    Ok(byte) => request.push(byte),
                    Err(_) => break,
                }
            }
            let request = String::from_utf8(request).unwrap().to_ascii_lowercase();
            let (status, body) = match request.split(' ').nth(1).unwrap_or_default() {
                "/latest/api/token" if request.starts_with("put") => ("200 OK", "token"),
                _ if !request.contains("x-aws-ec2-metadata-token: token") => ("401 Unauthorized", ""),
                "/latest/meta-data/mac" => ("200 OK", "0e:49:61:0f:c3:11"),
                "/latest/meta-data/network/interfaces/macs/0e:49:61:0f:c3:11/vpc-id" => ("200 OK", "vpc-7\n"),
                _ => ("404 Not Found", ""),
            };
            let answer = format!(
                "HTTP/1.1 {status}\r\nx-aws-ec2-metadata-token-ttl-seconds: 60\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    }

    #[tokio::test]
    async fn vpc_is_that_of_the_instance_unless_the_flag_names_one() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = tokio::spawn(serve(listener));
        let metadata = Client::builder().endpoint(url).unwrap().max_attempts(1).build();
        let args = |vpc: Option<&str>| AwsArgs {
            aws_cluster_name: Some("prod".to_owned()),
            aws_vpc_id: vpc.map(str::to_owned),
            ..AwsArgs::default()
        };
        for (flag, expected) in [(None, "vpc-7"), (Some(""), "vpc-7"), (Some("vpc-1"), "vpc-1")] {
            let found = args(flag).with_vpc_from(&metadata).await.unwrap();
            assert_eq!(found.aws_vpc_id.as_deref(), Some(expected));
        }
        server.abort();
        let _ = server.await;
        let error = args(None).with_vpc_from(&metadata).await.unwrap_err().to_string();
        assert!(error.contains("--aws-vpc-id") && error.contains("hop limit"), "{error}");
    }
}
