//! `dorm net`: what an agent may reach.

use anyhow::Result;
use dorm_server::api::types::Network;

use crate::cli::Global;
use crate::client::agent_path;
use crate::output;

/// Show or replace what an agent may reach
///
/// With any option, what the agent may reach becomes just what the options say, at once. Private and link-local
/// addresses, the host and other agents are always out of reach.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm net demo --no-internet --allow pypi.org --allow '*.pythonhosted.org'")]
pub(crate) struct Args {
    /// Name or id
    name: String,
    /// The whole internet again
    #[arg(long, conflicts_with_all = ["no_internet", "allow", "deny"])]
    open: bool,
    #[command(flatten)]
    policy: PolicyArgs,
}

/// What an agent may reach, as options.
#[derive(Debug, clap::Args)]
pub(crate) struct PolicyArgs {
    /// Nothing is reachable but what is allowed
    #[arg(long)]
    no_internet: bool,
    /// Reachable whatever is denied: an address, a block like 198.51.100.0/24, or a name like *.example.org
    #[arg(long, value_name = "TARGET", value_delimiter = ',')]
    allow: Vec<String>,
    /// Out of reach: an address or a block
    #[arg(long, value_name = "BLOCK", value_delimiter = ',')]
    deny: Vec<String>,
}

impl PolicyArgs {
    fn is_empty(&self) -> bool {
        !self.no_internet && self.allow.is_empty() && self.deny.is_empty()
    }
}

impl From<PolicyArgs> for Network {
    fn from(args: PolicyArgs) -> Self {
        Self {
            internet: !args.no_internet,
            allow: args.allow,
            deny: args.deny,
        }
    }
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let (client, path) = (global.client()?, agent_path(&args.name, "/network"));
    let network: Network = if args.open || !args.policy.is_empty() {
        client.put(&path, &Network::from(args.policy)).await?
    } else {
        client.get(&path).await?
    };
    if global.json {
        return output::json(&network);
    }
    output::fields(&fields(&network))
}

pub(crate) fn fields(network: &Network) -> Vec<(&'static str, String)> {
    let internet = if network.internet {
        "yes"
    } else {
        "only what is allowed"
    };
    let mut fields = vec![("internet", internet.to_owned())];
    fields.extend(network.deny.iter().map(|target| ("deny", target.clone())));
    fields.extend(network.allow.iter().map(|target| ("allow", target.clone())));
    fields
}
