"""amp: half precision with loss scaling."""
